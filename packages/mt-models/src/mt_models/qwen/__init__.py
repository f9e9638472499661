"""Qwen 2, 2.5 and 3: Llama with biases on queries, keys and values, or with normalized queries and keys."""

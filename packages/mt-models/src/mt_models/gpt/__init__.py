"""GPT: a decoder wide enough for GPT-2, GPT-3 and Llama-like models."""

"""Hugging Face's format: safetensors or torch files beside config.json and the tokenizer's files; modules in memory."""

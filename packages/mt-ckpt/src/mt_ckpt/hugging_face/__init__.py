"""Hugging Face's format: safetensors or torch files beside config.json and the tokenizer's files; modules in memory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Megatron-Core's checkpoints in the `torch` format: one file per tensor-, pipeline- and expert-parallel rank."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Configurations of Megatron-LM, Megatron-Bridge, NeMo and Accelerate as ours, with an account of each argument."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

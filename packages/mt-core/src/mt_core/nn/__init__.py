"""Layers shared by all model families. Each declares the layout of its parameters."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

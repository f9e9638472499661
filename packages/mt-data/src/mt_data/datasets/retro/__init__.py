"""Samples with neighbours of their chunks, for RETRO (Borgeaud et al., 2022)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

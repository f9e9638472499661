"""Retro: a chunk database, its index, and the neighbours of every chunk that training reads."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

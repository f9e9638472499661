"""Tokenizers: text to ids and back. One module for each registered kind; what they share is in `base`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Optimizers, schedules, clipping, loss scaling, 16-bit training with fp32 master weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

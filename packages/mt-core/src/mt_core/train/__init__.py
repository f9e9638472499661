"""The training engine, the loop around it, and callbacks. `Trainer` runs a configuration, `Engine` a custom loop."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

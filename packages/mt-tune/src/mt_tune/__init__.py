"""Fine-tuning, adapters, preferences, rewards and distillation, in the layouts of the trainer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

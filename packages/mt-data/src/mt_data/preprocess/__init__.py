"""From files of text to Megatron's indexed datasets (`mt data preprocess`), and the readers beneath it.

`run.preprocess(options.PreprocessOptions(...))` is the command as a function.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

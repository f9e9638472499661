"""Data sets: samples for training, cut from indexed token files.

The pieces are `splits` (which documents belong to a split), `gpt_index` and its kin (the order of
samples), `index_cache` (keeps built orders on a disk), `blend` (mixes data sets) and one module a
data set type.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

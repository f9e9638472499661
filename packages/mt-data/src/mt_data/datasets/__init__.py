"""Data sets: samples for training, cut from indexed token files.

The pieces are `splits` (which documents belong to a split), `gpt_index` and its kin (the order of
samples), `index_cache` (keeps built orders on a disk), `blend` (mixes data sets) and one module a
data set type.
"""

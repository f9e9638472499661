"""Attention by kernels for GPUs, in the form of `mt_core.nn.attention`. Packages are imported only when chosen."""

"""Triton kernels with the interfaces of their torch references. Imported only when selected."""

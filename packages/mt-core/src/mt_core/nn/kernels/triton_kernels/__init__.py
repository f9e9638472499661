"""Our kernels in Triton. Each module imports triton, so they are loaded only when chosen.

They run on CPU tensors with TRITON_INTERPRET=1 in the environment of the process, before triton is imported.
"""

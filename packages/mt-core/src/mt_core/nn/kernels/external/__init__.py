"""Thin wrappers of other packages' kernels, each with the signature of the reference. Imported only when chosen."""

"""Embeddings of passages on the disk: shards in NumPy's format with a manifest."""

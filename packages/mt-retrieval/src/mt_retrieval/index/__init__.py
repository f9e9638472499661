"""Indices of embeddings by inner product: exact with NumPy, or those of faiss."""

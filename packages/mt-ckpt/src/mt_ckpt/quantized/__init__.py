"""Quantized weights of Hugging Face folders, read as if the files were not quantized, and written."""

"""Perplexity of texts."""

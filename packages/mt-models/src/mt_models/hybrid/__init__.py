"""Hybrids: Mamba-2, attention and feed-forward layers in the order that a pattern gives."""

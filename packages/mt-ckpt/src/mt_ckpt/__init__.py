"""Checkpoint formats: loaders, savers, conversion, verification."""

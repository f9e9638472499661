"""Samples with neighbours of their chunks, for RETRO (Borgeaud et al., 2022)."""

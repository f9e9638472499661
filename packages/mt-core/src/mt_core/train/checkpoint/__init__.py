"""Checkpoints of a run: their contents, and how they are written, resumed and partially loaded."""

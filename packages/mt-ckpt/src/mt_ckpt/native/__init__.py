"""mt's own checkpoint format; docs/checkpoints.md describes it."""

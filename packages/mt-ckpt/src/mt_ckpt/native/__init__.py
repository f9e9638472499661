"""mt's native checkpoint format; docs/checkpoints.md describes it."""

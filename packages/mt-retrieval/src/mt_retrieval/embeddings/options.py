"""Defaults of embedding evidence."""

BATCH_SIZE = 128
SHARD_ROWS = 8192
"""What a killed run may lose on each rank."""

"""The memory of the engine: blocks of positions, states of sequences, prefixes in common."""

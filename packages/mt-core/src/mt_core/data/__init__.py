"""From configuration to batches of NumPy arrays; needs no torch."""

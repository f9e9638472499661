"""One optimizer step: forward and backward passes, reduction, update."""

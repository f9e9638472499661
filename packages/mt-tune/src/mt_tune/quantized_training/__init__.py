"""Training with the rounding of a quantization scheme in the forward pass."""

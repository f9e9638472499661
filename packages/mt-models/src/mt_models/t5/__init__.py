"""T5: an encoder and a decoder, in T5's own form with relative positions and in Megatron's with learned ones."""

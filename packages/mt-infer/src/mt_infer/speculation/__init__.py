"""Speculative decoding: several tokens of a sequence in one forward pass, where guesses of them turn out right."""

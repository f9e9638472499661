"""Comparison of two models tensor by tensor: the first one that differs, forward and then backward."""

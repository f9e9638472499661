"""Positions of a model that is tuned for longer texts: whether changed keys have changed them."""

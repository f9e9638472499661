"""Retro: a chunk database, its index, and the neighbours of every chunk that training reads."""

"""Pieces that families are composed from."""

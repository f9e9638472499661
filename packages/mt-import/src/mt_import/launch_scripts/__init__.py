"""Reads bash scripts that launch training, without executing anything in them."""

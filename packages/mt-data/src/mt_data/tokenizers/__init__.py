"""Tokenizers: text to ids and back. One module for each registered kind; what they share is in `base`."""

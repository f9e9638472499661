"""Mistral: Llama whose attention looks back a fixed number of positions."""

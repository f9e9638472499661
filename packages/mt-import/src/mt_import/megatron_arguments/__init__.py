"""Megatron-LM's arguments: a table of all of them, its parser's and validation's rules, and their translation."""

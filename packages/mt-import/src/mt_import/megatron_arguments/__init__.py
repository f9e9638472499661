"""Megatron-LM's arguments: a table of all of them, its parser's and validation's rules, and their translation.

Facts of Megatron-LM core_v0.12.2 (2025-06) and of its main branch of 2026-08; options of older versions and of those
between are in the table, too. Imports no torch.
"""

"""Readers of configurations: one module a program whose configuration becomes ours."""

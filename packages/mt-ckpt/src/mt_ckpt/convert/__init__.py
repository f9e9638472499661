"""Conversion between formats: `convert` from Python, `mt convert` from the command line."""

from mt_ckpt.convert.engine import Report, convert

__all__ = ["Report", "convert"]

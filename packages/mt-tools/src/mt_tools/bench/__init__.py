"""Benchmarks of `mt bench`. A case is a dictionary of plain values, written to the report as soon as it is measured."""

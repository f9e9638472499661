"""Partitioning of models and batches over processes."""

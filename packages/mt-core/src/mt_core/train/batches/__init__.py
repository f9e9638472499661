"""Batches on their way to the ranks and devices of a job."""

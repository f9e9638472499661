"""Reports, comparisons, a live view and control of training runs."""

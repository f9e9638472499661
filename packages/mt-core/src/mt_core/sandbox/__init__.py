"""Programs of others, such as generated ones, in processes with limits."""

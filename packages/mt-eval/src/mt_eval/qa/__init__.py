"""Questions answered with retrieved passages."""

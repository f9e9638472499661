"""Episodes of several turns: tools and environments, token in and token out."""

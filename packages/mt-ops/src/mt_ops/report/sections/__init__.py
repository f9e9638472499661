"""Parts of the page that are no curves; each is a function from the runs to a Section, or None without data."""

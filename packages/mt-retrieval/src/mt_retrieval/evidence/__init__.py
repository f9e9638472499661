"""Evidence: the passages that are searched, from a TSV file or from the blocks of an indexed data set."""

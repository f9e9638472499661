"""What the savers share: output folders that can be resumed, plans of files, options that a format refuses."""

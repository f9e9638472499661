"""What a run prints and records: log lines, files, metrics of a step."""

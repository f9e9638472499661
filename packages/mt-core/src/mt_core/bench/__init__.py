"""What `mt bench` measures. A case is a dictionary of plain values, in the report as soon as it is measured."""

"""The `mt` command."""

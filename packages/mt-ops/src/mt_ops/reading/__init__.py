"""Readers of runs: of mt, and of logs that other trainers write, all as named series over steps."""

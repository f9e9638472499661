"""Runs made to go wrong, for docs/guides/wrong-run.md: `python -m scripts.wrong_runs [NAME ...]`.

Each case trains small models, draws the picture of the page with `mt plot`, asks the command that the page names, and
makes sure that the answer names the fault within a minute.
"""

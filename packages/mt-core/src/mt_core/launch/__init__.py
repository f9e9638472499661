"""Several processes as one run: starting them, their places, their phases, and what happens when one fails.

`local` starts ranks on this machine; `environment` says which rank this process is, whoever started it;
`session` is what a rank's program wraps itself in. Nothing is imported here.
"""

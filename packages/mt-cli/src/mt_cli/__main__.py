"""`python -m mt_cli` is `mt`."""

from mt_cli.main import main

main()

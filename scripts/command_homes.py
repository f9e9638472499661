"""Writes `mt_cli/command_homes.py`: every command of mt, and the distribution that registers it.

`mt` must name the distribution of a command whose distribution is not installed, and then nothing else can tell.
Run it after adding a command; `tests/cli/test_main.py` compares.

    uv run scripts/command_homes.py
"""

from __future__ import annotations

from pathlib import Path

from mt_core.plugins import load_plugins
from mt_core.specs import COMMANDS

FILE = Path(__file__).parents[1] / "packages/mt-cli/src/mt_cli/command_homes.py"
HEAD = '''"""The distribution of every command of mt; written by `scripts/command_homes.py`."""

COMMAND_HOMES = {
'''


def registered_homes() -> dict[str, str]:
    """Command, a space before that of a group, -> distribution, for mt's own distributions that are installed."""
    commands = load_plugins()[COMMANDS]
    homes = {spec.name: commands.owners(spec.name)[0].distribution or "" for spec in commands}
    return {name: home for name, home in sorted(homes.items()) if home.startswith("mt-") and home != "mt-cli"}


def file_text() -> str:
    rows = [f'    "{name}": "{home}",\n' for name, home in registered_homes().items()]
    return f"{HEAD}{''.join(rows)}}}\n"


if __name__ == "__main__":
    FILE.write_text(file_text(), encoding="utf-8")

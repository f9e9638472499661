"""Options of a command that are the fields of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from mt_core.commands import Help, with_fields


@dataclass(frozen=True)
class Reading:
    key: Annotated[str, Help("Key of the text", "--key", "-k")]
    count: Annotated[int, Help("How many", min=1)] = 3
    fast: Annotated[bool, typer.Option("--fast", help="Without checks")] = False


@with_fields
def read(context: typer.Context, name: Annotated[str, typer.Argument()], reading: Reading, last: int = 7) -> None:
    """Reads."""
    assert context.info_name
    typer.echo(f"{name} {reading} {last}")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["a", "-k", "b"], 0, "a Reading(key='b', count=3, fast=False) 7"),
        (["a", "--key", "b", "--count", "4", "--fast", "--last", "1"], 0, "a Reading(key='b', count=4, fast=True) 1"),
        (["a"], 2, "--key"),
        (["a", "-k", "b", "--count", "0"], 2, "--count"),
        (["--help"], 0, "How many"),
    ],
)
def test_fields_are_options(words: list[str], code: int, said: str) -> None:
    app = typer.Typer()
    app.command()(read)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code
    assert said in result.output

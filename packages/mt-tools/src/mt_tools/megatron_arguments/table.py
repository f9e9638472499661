"""Every argument of Megatron-LM: how its parser reads it, and what it stands for here.

The data is in arguments.csv, with these columns:

    option, dest        as typed, without dashes; the attribute that it sets
    takes               int, float, text, pattern (a number or a list of 0 and 1), window (two integers); with * or +
                        any number of values, with a digit so many; true, false: it takes no value and sets this;
                        pair: --x and --no-x
    choices             separated by |
    default             of Megatron's main branch; empty: None, False of `true`, True of `false`; none: None of these
    default_0_12        where core_v0.12 has another one
    versions            empty: main branch; 0.12: up to 0.12 or so; between: after 0.12, gone since; older: before 0.12;
                        vlm: of pretrain_vlm.py and examples/multimodal
    outcome, keys       copy: its value is that of the key; model, rule: the keys that it decides, among others;
                        none: no effect here; refused: any value but the default
    reason              of none: a word of REASONS; of refused: what it requests
    group               of Megatron's --help
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Outcome = Literal["copy", "model", "rule", "none", "refused"]
Version = Literal["0.12", "main"]
FLAGS: Mapping[str, Any] = {"true": False, "false": True, "pair": False}
"""What takes no value -> its default."""
REASONS: Mapping[str, str] = {
    "always": "always so",
    "checkpoints": "checkpoints are written in the format of mt; mt convert writes others",
    "comm": "how messages are sent and overlapped changes no result",
    "data": "how samples are read changes none of them",
    "init": "each initial weight is drawn from the seed, the same for every layout",
    "kernels": "another implementation of the same computation; [kernels] and model.attention_backend choose",
    "memory": "how memory is reused changes no result",
    "models": "counts for models only that Megatron no longer has",
    "norms": "norm weights are kept as they are, not less one, which computes the same",
    "noop": "Megatron ignores it, too, or it is always so",
    "parent": "counts only together with an option that is refused, or changes no result",
    "quantile": "counts only with quantile_balancing, which is refused",
    "records": "metrics.jsonl and log.txt in the run directory are the records",
    "restarts": "docs/launching.md says how faults and restarts are handled",
    "serving": "for text generation, not for training",
}


@dataclass(frozen=True)
class Argument:
    """A row of the table."""

    option: str
    dest: str
    takes: str
    choices: tuple[str, ...]
    default: Any
    default_0_12: Any
    versions: str
    outcome: Outcome
    keys: tuple[str, ...]
    reason: str
    group: str

    @property
    def spelled(self) -> str:
        return f"--{self.option}"

    @property
    def is_flag(self) -> bool:
        return self.takes in FLAGS

    @property
    def kind(self) -> str:
        """`takes` without how many."""
        return self.takes.rstrip("*+23")

    @property
    def count(self) -> str:
        """How many values: `*`, `+`, a number, or nothing for one."""
        return self.takes.removeprefix(self.kind)

    def default_of(self, version: Version) -> Any:
        return self.default_0_12 if version == "0.12" else self.default


@cache
def arguments() -> tuple[Argument, ...]:
    """All rows, in the order of Megatron's --help."""
    # Read at the first use, not when the module is imported.
    text = files("mt_tools.megatron_arguments").joinpath("arguments.csv").read_text(encoding="utf-8")
    return tuple(_argument(row) for row in csv.DictReader(text.splitlines()))


@cache
def by_option() -> Mapping[str, Argument]:
    """Spelling with dashes -> argument, second spellings included."""
    found = {argument.spelled: argument for argument in arguments()}
    # Second: a row of its own wins over another row's alias.
    for argument in arguments():
        for spelling in _second_spellings(argument):
            found.setdefault(spelling, argument)
    return found


@cache
def by_dest() -> Mapping[str, Argument]:
    """Attribute -> the argument that sets it; of several that do the first."""
    found: dict[str, Argument] = {}
    for argument in arguments():
        found.setdefault(argument.dest, argument)
    return found


def defaults(version: Version) -> dict[str, Any]:
    """Attribute -> its value when nothing is given, of all versions' arguments."""
    return {dest: argument.default_of(version) for dest, argument in by_dest().items()}


def keys_with_options() -> dict[str, list[str]]:
    """Key -> the spellings that decide it."""
    found: dict[str, list[str]] = {}
    for argument in arguments():
        for key in argument.keys if argument.versions != "older" else ():
            found.setdefault(key, []).append(argument.spelled)
    return found


def explain_option(option: str) -> str | None:
    """What becomes of an option that decides no key; None: Megatron does not have it, or it decides one."""
    argument = by_option().get(option)
    if argument is None:
        return None
    if argument.outcome == "refused":
        return f"cannot be done: {argument.reason}"
    return f"no effect here: {REASONS[argument.reason]}" if argument.outcome == "none" else None


def _second_spellings(argument: Argument) -> Iterable[str]:
    """Aliases: of true defaults --no-x and --disable-x, of pairs --no-x."""
    name = argument.option
    if argument.takes == "pair":
        yield f"--no-{name}"
    if argument.takes == "false" and name.startswith("no-"):
        yield f"--disable-{name.removeprefix('no-')}"
    if argument.takes == "false" and name.startswith("disable-"):
        yield f"--no-{name.removeprefix('disable-')}"
    # These options have an underscore in their name; the spelling with a hyphen is accepted too.
    if "opt_param" in name:
        yield f"--{name.replace('_', '-')}"
    if name == "save-interval":
        yield "--persistent-save-interval"


def _argument(row: Mapping[str, str]) -> Argument:
    takes = row["takes"]
    default = _value(takes, row["default"])
    return Argument(
        option=row["option"],
        dest=row["dest"],
        takes=takes,
        choices=tuple(row["choices"].split("|")) if row["choices"] else (),
        default=default,
        default_0_12=_value(takes, row["default_0_12"]) if row["default_0_12"] else default,
        versions=row["versions"],
        outcome=row["outcome"],  # type: ignore[arg-type]
        keys=tuple(row["keys"].split()),
        reason=row["reason"],
        group=row["group"],
    )


def _value(takes: str, text: str) -> Any:
    if takes in FLAGS:
        return None if text == "none" else FLAGS[takes]
    if not text:
        return None
    kind = takes.rstrip("*+23")
    value = {"int": int, "float": float, "pattern": int}.get(kind, str)(text)
    # Several values: the default of one is a list of it.
    return [value] if takes != kind else value

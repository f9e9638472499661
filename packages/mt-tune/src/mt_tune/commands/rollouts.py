"""`mt rollouts`: the completions that a run was trained on, with their rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

SHOWN = 60
"""Characters of a prompt or a completion in the table."""
Line = Mapping[str, Any]


def rollouts(
    run: Annotated[Path, typer.Argument(help="Directory of a run of mt tune grpo.")],
    step: Annotated[int | None, typer.Option(help="Completions of one step. Default: the last.")] = None,
    best: Annotated[int | None, typer.Option(help="So many with the highest rewards, of all steps.", min=1)] = None,
    worst: Annotated[int | None, typer.Option(help="So many with the lowest rewards, of all steps.", min=1)] = None,
    find: Annotated[str | None, typer.Option(help="Only prompts or completions with this text.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole texts, one completion after the other.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """The completions that a run drew and was trained on, with their rewards and advantages."""
    from mt_core.errors import ConfigError, DataError
    from mt_tune.rl.rollout_file import ROLLOUTS_FILE, read_rollouts

    selectors = [name for name, value in (("--step", step), ("--best", best), ("--worst", worst)) if value is not None]
    if len(selectors) > 1:
        raise ConfigError(f"{' and '.join(selectors)} choose completions in different ways; give one of them")
    lines = chosen(read_rollouts(run / ROLLOUTS_FILE), step, best, worst, find)
    if not lines:
        raise DataError(f"{run / ROLLOUTS_FILE} has no such completion; leave out --step or --find")
    if as_json:
        typer.echo("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
        return
    typer.echo("\n\n".join(map(whole, lines)) if full else table(lines))


def chosen(
    lines: Sequence[Line], step: int | None, best: int | None, worst: int | None, find: str | None
) -> list[Line]:
    """Those that the options name; without any those of the last step."""
    matching = [line for line in lines if find is None or find in text_of(line["prompt"]) or find in line["completion"]]
    if best is not None or worst is not None:
        judged = sorted((line for line in matching if line["reward"] is not None), key=lambda line: line["reward"])
        return judged[::-1][:best] if best is not None else judged[:worst]
    last = max((line["step"] for line in matching), default=None)
    return [line for line in matching if line["step"] == (last if step is None else step)]


def text_of(prompt: Any) -> str:
    """A prompt that is a text, or its messages one after the other."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn.get('content')}" for turn in prompt)


def table(lines: Sequence[Line]) -> str:
    names = list(dict.fromkeys(name for line in lines for name in line["rewards"]))
    names = names if len(names) > 1 else []
    header = ["step", "prompt", "completion", "reward", *names, "advantage", "tokens", "end"]
    rows = [
        [
            str(line["step"]),
            shortened(text_of(line["prompt"])),
            shortened(line["completion"]),
            number(line["reward"]),
            *(number(line["rewards"].get(name)) for name in names),
            number(line["advantage"]),
            str(line["tokens"]),
            line["finish"],
        ]
        for line in lines
    ]
    return as_columns([header, *rows])


def as_columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def shortened(text: str) -> str:
    """On one line."""
    flat = repr(text)[1:-1]
    return flat if len(flat) <= SHOWN else flat[: SHOWN - 3] + "..."


def whole(line: Line) -> str:
    rewards = ", ".join(f"{name} {number(value)}" for name, value in line["rewards"].items())
    return (
        f"step {line['step']}, {line['source']}: reward {number(line['reward'])} ({rewards}), advantage "
        f"{number(line['advantage'])}, {line['tokens']} tokens, end: {line['finish']}\n"
        f"--- prompt\n{text_of(line['prompt'])}\n--- completion\n{line['completion']}"
    )

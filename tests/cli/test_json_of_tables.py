"""Every command that prints a table prints JSON as well, or writes the same content to a file."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mt_cli.app import build_group
from mt_core.plugins import load_plugins

TABLES = ("Table", "number_table")
FILE = "--report"
"""Option for a file that has, as JSON, what the table shows."""


def commands() -> dict[str, Any]:
    """ "data preprocess" -> the command."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        command = command.load() if hasattr(command, "load") else command
        if not hasattr(command, "commands"):
            yield name, command
        for part, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {part}".strip())

    return dict(walk(build_group(load_plugins()), ""))


def prints_table(function: Callable[..., Any]) -> bool:
    """Whether a function, or one that it names of the commands' modules, makes a table of rich."""
    todo, seen = [inspect.unwrap(function)], set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        tree = ast.parse(textwrap.dedent(inspect.getsource(current)))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if names.intersection(TABLES):
            return True
        found = (inspect.unwrap(current).__globals__.get(name) for name in names)
        todo += [value for value in found if inspect.isfunction(value) and ".commands" in value.__module__]
    return False


@pytest.mark.slow
def test_every_command_with_a_table_has_json() -> None:
    with_tables = {name: command for name, command in commands().items() if prints_table(command.callback)}
    # Known ones: the search finds tables in the function itself and in one that it calls.
    assert {"models", "plan", "estimate", "ckpt inspect", "ckpt diff", "config keys"} <= with_tables.keys()
    lacking = [
        name
        for name, command in with_tables.items()
        if not {option for p in command.params for option in p.opts}.intersection({"--json", FILE})
    ]
    assert lacking == []


def test_a_report_in_a_file_is_no_list_of_an_option() -> None:
    """An option that lists things in place of the work, as --rules does, needs --json: no file has its table."""
    listing = {
        name: {option for p in command.params for option in p.opts}
        for name, command in commands().items()
        if any(p.is_eager and "--help" not in p.opts for p in command.params)
    }
    assert "data clean" in listing
    assert [name for name, options in listing.items() if "--json" not in options] == []


def test_rules_as_json(mt, tmp_path: Path) -> None:
    first, second = (mt("data", "clean", *words) for words in (["--rules", "--json"], ["--json", "--rules"]))
    assert (first.code, first.out) == (0, second.out)
    rules = json.loads(first.out)
    assert rules["min_words_per_line"]["c4"] == 5
    assert rules["min_words_per_line"]["openwebtext"] is None
    assert all(rule["description"] for rule in rules.values())
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    done = mt("data", "clean", tmp_path / "a.jsonl", "-o", tmp_path / "out", "--preset", "none", "--json")
    assert json.loads(done.out)["documents"]["read"] == 1


def test_a_checkpoint_and_a_difference_as_json(mt, tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        run = tmp_path / str(seed)
        settings = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "data.seq_length=16"]
        settings += ["train.train_iters=1", "train.eval_iters=1", "train.sample_prompt=null", f"train.seed={seed}"]
        settings += ["data.dataset_type=mock", "lr_schedule.lr_warmup_iters=0", "train.micro_batch_size=1"]
        done = mt("train", "--run-dir", run, *(part for one in settings for part in ("--set", one)))
        assert done.code == 0, done.err
        runs.append(run)
    found = json.loads(mt("ckpt", "inspect", runs[0], "--json").out)
    shapes = {entry["name"]: entry["shape"] for entry in found["tensors"]}
    assert shapes["model.embedding.word_embeddings.weight"][1] == 16
    assert json.loads(mt("ckpt", "diff", runs[0], runs[0], "--json").out)["differences"] == []
    other = mt("ckpt", "diff", *runs, "--model-only", "--json")
    assert other.code == 1
    assert {one["name"] for one in json.loads(other.out)["differences"]} <= shapes.keys()

"""What `mt config init` writes trains: each model family with each kind of data, and text in each form, made small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path

import pytest
from tests.covering import EXHAUSTIVE

from mt_cli.wizard import make_draft
from mt_core.config.loading import LoadedConfig, config_from_dict
from mt_core.config.schema import Config
from mt_core.config.sources import installed_presets
from mt_core.errors import MtError
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train.trainer import Trainer
from mt_tools.verify.small_config import shrink

SHORT = {"steps": "1", "micro-batch-size": "1", "global-batch-size": "1", "processes": "1"}
PROSE = "Größe, café: the quick brown fox jumps over the lazy dog. " * 40
QUICK = {"eval_interval": None, "eval_iters": 1, "sample_prompt": None, "device": "cpu", "num_threads": 1}


@cache
def host() -> PluginHost:
    """Shared: the sheets look up as much in it as they train."""
    return load_plugins()


@cache
def one_preset_of_each_family() -> dict[str, str]:
    """Family -> its first preset."""
    first: dict[str, str] = {}
    for name, owners in installed_presets(host())[0].items():
        first.setdefault(owners[0].family, name)
    return first


def smaller(config: Config) -> LoadedConfig:
    """The answers' data and tokenizer with a model of few and narrow layers, for a step."""
    tree = config.to_dict()
    tree["model"] = {**shrink(config, host(), steps=2).to_dict()["model"], "vocab_size": None}
    tree["train"] |= QUICK
    tree["lr_schedule"]["lr_warmup_iters"] = 0
    tree["precision"]["dtype"] = "fp32"
    if tree["data"].get("corpus_bytes"):
        tree["data"]["corpus_bytes"] = 1_000_000
    if tree["data"]["dataset_type"] == "mock":
        tree["data"]["split"] = "1,1,98"  # of the mock corpus, whose index is long
    return LoadedConfig(config_from_dict(tree, host()), {}, None)


DATA = ("builtin", "mock", "text")
ALL_DATA = ("gpt", "bert", "t5", "vision")
"""Families of each kind of samples, which meet all data; others meet one kind each, in turn: what a family answers and
what data answers are looked up apart from one another."""


def sheets() -> Iterator[object]:
    for number, (family, preset) in enumerate(one_preset_of_each_family().items()):
        for place, data in enumerate(DATA):
            default = family in ALL_DATA or number % len(DATA) == place
            yield pytest.param(preset, data, id=f"{family}-{data}", marks=() if default else EXHAUSTIVE)


@pytest.mark.long
@pytest.mark.parametrize(("preset", "data"), list(sheets()))
def test_what_the_questions_accept_trains(tmp_path: Path, preset: str, data: str) -> None:
    (tmp_path / "prose.txt").write_text(PROSE)
    answer = str(tmp_path) if data == "text" else data
    given = {"model": preset, "data": answer, **SHORT, "seq-length": "32"}
    # An answer that is refused makes no file; a decoder of text takes all of them.
    draft = None
    with nullcontext() if takes_text(preset) else suppress(MtError):
        draft = make_draft(host(), False, given, None, pytest.fail)
    if draft is None:
        return
    trainer = Trainer(smaller(draft.config()), run_dir=tmp_path / "run", host=host())
    assert trainer.train().state.iteration == 1


def takes_text(preset: str) -> bool:
    family = next(family for family, name in one_preset_of_each_family().items() if name == preset)
    return family in ("gpt", "llama", "mistral", "qwen", "gemma", "mixtral", "qwen_moe", "deepseek", "mamba", "hybrid")


TEXTS = {
    "novel.txt": PROSE.encode(),
    "notes/a/b.md": PROSE.encode("cp1252"),
    "notes/c.txt": PROSE.encode(),
    "marked.txt": PROSE.encode("utf-16"),
    "posts.jsonl": b"".join(json.dumps({"id": "1", "body": PROSE[:90]}).encode() + b"\n" for _ in range(3)),
}


@pytest.mark.parametrize(
    "data",
    [
        "novel.txt",
        "notes",
        "notes/**/*.md",
        "marked.txt",
        "posts.jsonl",
        "0.3 notes/c.txt 0.7 novel.txt",
        "novel.txt notes",
    ],
)
def test_text_in_any_form_trains_as_it_was_answered(mt, tmp_path: Path, monkeypatch, data: str) -> None:
    for name, content in TEXTS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    short = [part for name, answer in SHORT.items() for part in (f"--{name}", answer)]
    made = mt("config", "init", "my.toml", "--yes", "--data", data, "--seq-length", 32, *short)
    assert made.code == 0, made.err
    narrow = ("model.num_layers=1", "train.eval_iters=1", "train.sample_prompt=null", "lr_schedule.lr_warmup_iters=0")
    done = mt("train", "my.toml", *(part for setting in narrow for part in ("--set", setting)))
    assert done.code == 0, done.err


def test_too_little_text_is_refused_before_a_file_is_written(mt, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once.")
    outcome = mt("config", "init", tmp_path / "my.toml", "--yes", "--data", tmp_path / "a.txt")
    assert outcome.code != 0
    assert "add text" in outcome.err or "add sequences" in outcome.err
    assert not (tmp_path / "my.toml").exists()

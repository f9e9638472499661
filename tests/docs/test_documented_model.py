"""docs/guides/add-a-model.md: the family that the page writes computes its formula, is checked, and trains."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tests.docs.blocks import write_package

from mt_cli import main
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import Plugin, PluginHost, load_plugins
from mt_core.train.build import build_model

PAGE = "docs/guides/add-a-model.md"
PRESET = "sinks-tiny"
KEYS = ("model.vocab_size=64", "train.train_iters=1")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginHost:
    """With the plugin of the page, whose files lie in a folder that Python imports from."""
    write_package(PAGE, "sink_model", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("sink_model")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    host = load_plugins()
    host.add(importlib.import_module("sink_model.plugin"), Plugin("sinks", "sink_model.plugin", "sink-model", "1.0.0"))
    return host


def test_the_tests_of_the_page_pass(host: PluginHost) -> None:
    config, ctx = load_config(preset=PRESET, overrides=KEYS, host=host).config, ParallelContext()
    model = build_model(config, ctx, host).eval()
    initialize(model, 1, ctx)
    module = importlib.import_module("sink_model.test_sinks")
    tests = [function for name, function in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for function in tests:
        function(model)


def test_the_rule_of_the_page(host: PluginHost) -> None:
    with pytest.raises(ConfigError, match="window_attn_skip_freq=3 leaves no layer.*at most model.num_layers=2"):
        load_config(preset=PRESET, overrides=[*KEYS, "model.window_attn_skip_freq=3"], host=host)


@pytest.mark.slow
def test_the_family_of_the_page_trains(host: PluginHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_cli.commands.train.load_plugins", lambda: host)
    monkeypatch.setattr(main, "load_plugins", lambda **_: host)
    quick = ["train.train_iters=2", "train.sample_prompt=null", "data.corpus_bytes=1000000", "train.eval_iters=1"]
    assert main.run(["train", "--preset", PRESET, *(part for text in quick for part in ("--set", text))]) == 0
    assert (tmp_path / "runs" / PRESET / "checkpoints" / "latest").exists()

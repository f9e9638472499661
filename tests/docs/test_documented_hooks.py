"""docs/guides/plugins.md: the package `my_hooks` of the page trains, and each hook has the effect that is described.

Found by it: a signature of the page that mt does not call, or a state that is not restored."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tests.docs.blocks import write_package

from mt_core.config import load_config
from mt_core.errors import ConfigError
from mt_core.plugins import Plugin, PluginHost, load_plugins
from mt_core.specs import RUN_REQUESTS
from mt_core.train import Callback, Trainer

PAGE = "docs/guides/plugins.md"
SMALL = ["model.num_layers=2", "model.hidden_size=16", "model.num_attention_heads=2", "data.seq_length=32",
         "data.corpus_bytes=1000000", "train.micro_batch_size=2", "train.global_batch_size=2", "train.eval_iters=1",
         "train.sample_prompt=null", "lr_schedule.lr_warmup_iters=0", "logging.log_interval=1"]  # fmt: skip
HOOKS = ['train.callbacks=["my_counter"]', "train.batch_source=my_short_first", "my_hooks.short_batches=5",
         "my_hooks.large_gradient=0.0", "my_hooks.largest_interval=1", "my_hooks.frozen_layers=1"]  # fmt: skip


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginHost:
    write_package(PAGE, "my_hooks", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("my_hooks")]:
        monkeypatch.delitem(sys.modules, name)
    import my_hooks.plugin  # type: ignore[import-not-found]

    host = load_plugins()
    host.add(my_hooks.plugin, Plugin("my-hooks", "my_hooks.plugin", "my-hooks", "1.0.0"))
    return host


class Notes(Callback):
    def __init__(self) -> None:
        self.logged: list[Any] = []
        self.evaluated: list[Any] = []

    def on_log(self, run: Any, metrics: Any) -> None:
        self.logged.append(metrics["large_gradients"])

    def on_evaluation(self, run: Any, metrics: Any) -> None:
        self.evaluated += [metrics["largest_weight"]] if "largest_weight" in metrics else []


def trainer_of(host: PluginHost, folder: Path, steps: int, notes: Notes) -> Trainer:
    overrides = [*SMALL, *HOOKS, f"train.train_iters={steps}", 'checkpoint.accept_changes=["train.train_iters"]']
    config = load_config(preset="gpt-tiny", overrides=overrides, host=host)
    return Trainer(config, run_dir=folder, host=host, callbacks=[notes])


def test_the_hooks_of_the_page_train_and_resume(host: PluginHost, tmp_path: Path) -> None:
    notes, folder = Notes(), tmp_path / "run"
    trainer = trainer_of(host, folder, 2, notes)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    trained = {name for name, parameter in after.items() if not torch.equal(parameter, before[name])}
    assert trained == {name for name in after if not name.startswith("layers.0.")}, "the model transform"
    assert notes.logged == [1, 2], "run.record"
    largest = max(parameter.detach().abs().max().item() for parameter in after.values())
    assert len(notes.evaluated) >= 2
    assert notes.evaluated[-1] == pytest.approx(largest), "the evaluator"
    answer = host[RUN_REQUESTS].get("my_position").answer.load()
    assert (answer(trainer, "", "Ann"), answer(trainer, "short", "Ann")) == ("step 2/2, for Ann", "2/2")

    resumed = Notes()
    trainer = trainer_of(host, folder, 4, resumed)
    trainer.train()
    assert resumed.logged == [3, 4], "the state of the callback"
    assert trainer.source.state_dict() == {"remaining": 1}, "the state of the batch source"


def test_a_key_is_refused_where_the_other_section_does_not_use_it(host: PluginHost) -> None:
    with pytest.raises(ConfigError, match=r"my_hooks\.short_batches"):
        load_config(preset="gpt-tiny", overrides=["my_hooks.short_batches=3"], host=host)

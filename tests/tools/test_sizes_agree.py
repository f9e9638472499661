"""One model has one number of parameters, whichever command says it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.covering import EXHAUSTIVE

from mt_cli.presets import measured_preset
from mt_core.config.loading import config_from_dict
from mt_core.config.sources import find_preset, installed_presets
from mt_core.plugins import load_plugins
from mt_tools.plan.estimate import model_size
from mt_tools.plan.layouts import Planner
from mt_tools.plan.machines import get_machine


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first of each family", pytest.param("all", marks=EXHAUSTIVE)])
def test_models_estimate_and_plan_count_alike(which: str) -> None:
    host, machine, differing = load_plugins(), get_machine("h100"), {}
    presets = installed_presets(host)[0]
    first = {owners[0].family: name for name, owners in reversed(presets.items())}
    for name in presets if which == "all" else first.values():
        size = measured_preset(name, host).size
        assert size is not None, name
        planner = Planner(config_from_dict(find_preset(name, host), host), host, machine)
        counts = {size.total, model_size(planner.whole_model).parameters, planner.parameters.total}
        if len(counts) > 1:
            differing[name] = counts
    assert differing == {}


def test_the_commands_show_the_same_number(mt, tmp_path: Path) -> None:
    """Of a vocabulary that is padded: 261 bytes and special tokens in rows of a multiple of 128."""
    shown = {
        "models": json.loads(mt("models", "gpt-tiny", "--json").out)["presets"][0]["size"]["total"],
        "estimate": json.loads(mt("estimate", "gpt-tiny", "--dtypes", "float32", "--json").out)["parameters"],
        "plan": json.loads(mt("plan", "--preset", "gpt-tiny", "--json").out)["parameters"]["total"],
    }
    settings = ("train.train_iters=1", "train.eval_iters=1", "train.sample_prompt=null", "data.corpus_bytes=1000000")
    settings += ("train.micro_batch_size=1", "train.global_batch_size=1", "lr_schedule.lr_warmup_iters=0")
    done = mt("train", "--run-dir", tmp_path / "run", *(part for one in settings for part in ("--set", one)))
    assert done.code == 0, done.err
    said = re.search(r"gpt: ([\d,]+) parameters", (tmp_path / "run" / "log.txt").read_text())
    assert said is not None
    assert {*shown.values()} == {int(said[1].replace(",", ""))}, shown

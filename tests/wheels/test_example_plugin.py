"""The model and the callback of the example plugin, from its source."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.infer.decoding import cached_logits

from mt_core.specs import CALLBACKS

SOURCE = Path(__file__).parents[2] / "examples" / "mt-plugin-example" / "src"
KERNEL = 4


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """mt's plugins and the example's."""
    from mt_core.plugins import Plugin, load_plugins

    monkeypatch.syspath_prepend(str(SOURCE))
    from mt_plugin_example import plugin

    host = load_plugins()
    if not any(entry.name == "example" for entry in host.plugins):
        host.add(plugin, Plugin("example", plugin.__name__, "mt-plugin-example", "0.1.0"))
    yield host
    for name in [name for name in sys.modules if name.startswith("mt_plugin_example")]:
        del sys.modules[name]


@pytest.fixture
def model(host):
    from mt_core.config.loading import load_config
    from mt_core.nn.layout import initialize
    from mt_core.parallel.context import ParallelContext
    from mt_core.train.build import build_model

    keys = ["vocab_size=17", "num_layers=2", "hidden_size=16", f"kernel_size={KERNEL}", "init_method_std=0.3"]
    config = load_config(preset="conv-tiny", overrides=[f"model.{key}" for key in keys], host=host).config
    model = build_model(config, ParallelContext(), host)
    initialize(model, 1, ParallelContext())
    return model.eval()


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(17, (2, length), generator=torch.Generator().manual_seed(seed))


def test_convolution_is_the_one_of_torch(model) -> None:
    conv = model.layers[0].mixer.conv
    x = torch.randn(2, 9, 16)
    expected = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x.mT, (KERNEL - 1, 0)), conv.weight.flip(1)[:, None], groups=16
    ).mT
    torch.testing.assert_close(conv(x), expected)


@torch.no_grad()
def test_decoding_with_the_cache_is_the_same(model) -> None:
    ids = tokens(12)
    torch.testing.assert_close(cached_logits(model, ids, (5, 6, 7, 12)), model(ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_position_sees_neither_what_follows_nor_other_documents(model) -> None:
    ids, other = tokens(12), tokens(12, seed=1)
    changed = torch.cat([ids[:, :6], other[:, 6:]], dim=1)
    assert torch.equal(model(ids)[:, :6], model(changed)[:, :6])
    segments = torch.tensor([[0] * 6 + [1] * 6] * 2)
    packed = model(torch.cat([other[:, :6], ids[:, 6:]], dim=1), segment_ids=segments)
    torch.testing.assert_close(packed[:, 6:], model(ids[:, 6:]), rtol=1e-5, atol=1e-5)


def test_every_parameter_has_a_layout(model) -> None:
    from mt_core.nn.layout import parameter_layouts

    assert parameter_layouts(model)["layers.1.mixer.conv.weight"].shape == (16, KERNEL)


def test_a_resumed_run_writes_no_line_twice(host, tmp_path: Path) -> None:
    callback = host[CALLBACKS].get("loss_csv").build.load()

    def train(first: int, last: int) -> None:
        directory = SimpleNamespace(path=tmp_path)
        run = SimpleNamespace(directory=directory, state=SimpleNamespace(iteration=first))
        observer = callback(config=None)
        observer.on_train_start(run)
        for iteration in range(first + 1, last + 1):
            observer.on_step_end(run, {"iteration": iteration, "loss": 1 / iteration, "learning_rate": 0.1})

    train(0, 5)
    train(3, 6)  # killed after step 5, resumed from a checkpoint of step 3
    with (tmp_path / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert float(rows[-1]["loss"]) == 1 / 6

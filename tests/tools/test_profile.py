"""`mt profile`: recorded steps by layer and kind, the roof, the largest losses, and one trace of all ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mt_core.errors import ConfigError
from mt_tools.commands.profile import parse_steps
from mt_tools.profile.operations import summarize
from mt_tools.profile.recording import ModuleRanges, is_named
from mt_tools.profile.report import losses, merge_traces, rows

SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "data.seq_length=32")
FEW = ("train.global_batch_size=2", "train.micro_batch_size=2", "train.train_iters=9")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)[..., :64]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x


def test_flops_of_products_are_those_of_their_layer_and_direction() -> None:
    """2 * 10 * 64 * 128 FLOPs forward in each layer, twice that backward (once in the first: its input has no
    gradient)."""
    model = Two()
    ranges = ModuleRanges(model)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as recorded:
        model(torch.randn(10, 64)).sum().backward()
    ranges.remove()
    found = {
        (entry["layer"], entry["kind"], entry["direction"]): entry for entry in summarize(recorded.events(), 1, "cpu")
    }
    product = 2 * 10 * 64 * 128
    assert {key: entry["flops"] for key, entry in found.items() if entry["flops"] >= product} == {
        ("decoder.layers.0", "feed-forward", "forward"): product,
        ("decoder.layers.1", "feed-forward", "forward"): product,
        ("decoder.layers.0", "feed-forward", "backward"): product,
        ("decoder.layers.1", "feed-forward", "backward"): 2 * product,
    }
    assert not any(module._forward_hooks for module in model.modules())


def test_which_modules_have_a_name_in_the_trace() -> None:
    named = ["decoder.layers.0", "decoder.layers.0.mlp", "decoder.final_layernorm", "output_layer", "embedding"]
    assert all(map(is_named, named))
    assert not is_named("decoder.layers.0.mlp.linear_fc1")
    assert not is_named("decoder.layers")


def summary(rank: int, **parts: float) -> dict[str, Any]:
    operations = [
        {
            "layer": "l.0",
            "kind": "attention",
            "direction": "forward",
            "seconds": 2.0,
            "product_seconds": 1.0,
            "flops": 4e12,
        },
        {"layer": "l.0", "kind": "norm", "direction": "backward", "seconds": 1.0, "product_seconds": 0.0, "flops": 0.0},
    ]
    return {"rank": rank, "seconds": 4.0, "parts": parts, "axes": {"tp": 2}, "operations": operations}


def test_the_table_and_the_losses_by_hand() -> None:
    both = [summary(0, data_wait=0.5, communication=1.0), summary(1, data_wait=0.3, communication=2.0)]
    assert [(row.name, row.direction, row.seconds, row.tflops) for row in rows(both, by_layer=False)] == [
        ("attention", "forward", 2.0, 4.0),
        ("norm", "backward", 1.0, None),
    ]
    assert [row.name for row in rows(both, by_layer=True)] == ["l.0", "l.0"]
    # 8 TFLOP/s: the 4 TFLOP need half of their second; 2 of 3 seconds are no products; ranks wait for 1.5 s.
    assert [(loss.what, loss.seconds) for loss in losses(both, 8.0)] == [
        ("operations that are no products", 2.0),
        ("waiting for other ranks", 1.5),
        ("products below the roof", 0.5),
        ("waiting for data", 0.4),
        ("the optimizer", 0.0),
    ]
    assert "parallel.tp_comm_overlap" in losses(both, 8.0)[1].key


def test_ranks_stay_apart_in_the_merged_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        with gzip.open(tmp_path / f"trace-rank-{rank}.json.gz", "wt") as file:
            json.dump({"traceEvents": [{"ph": "X", "pid": 7, "name": "aten::mm", "id": 3}]}, file)
    with gzip.open(merge_traces(tmp_path), "rt") as file:
        events = json.load(file)["traceEvents"]
    assert [(event["pid"], event["id"]) for event in events] == [("rank 0, 7", "0-3"), ("rank 1, 7", "1-3")]


@pytest.mark.parametrize("text", ["5", "5:3", "0:2", "a:b", "2:"])
def test_steps_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="expected A:B"):
        parse_steps(text)
    assert parse_steps("3:5") == (3, 5)


@pytest.mark.slow
def test_a_configuration_is_recorded_and_read_again(mt: Callable[..., Any], tmp_path: Path) -> None:
    """About 4 s."""
    folder = str(tmp_path / "profile")
    settings = [part for key in (*SMALL, *FEW) for part in ("--set", key)]
    done = mt("profile", "--preset", "gpt-tiny", "--steps", "2:3", "-o", folder, *settings, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["losses"], "the log of the training is not on the standard output"
    assert json.loads((tmp_path / "profile/summary-rank-0.json").read_text())["roof_tflops"] > 0
    assert "The largest losses of a step" in mt("profile", folder).out
    with gzip.open(tmp_path / "profile" / "trace.json.gz", "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert {"module: decoder.layers.1.self_attention", "module: decoder.layers.0.mlp", "module: embedding"} <= names
    again = mt("profile", folder, "--by-layer", "--json")
    assert again.code == 0, again.err
    content = json.loads(again.out)
    assert {row["name"] for row in content["rows"]} >= {"decoder.layers.0", "decoder.layers.1", "optimizer"}
    assert sum(row["share"] for row in content["rows"]) == pytest.approx(1.0)
    assert len(content["losses"]) == 5


@pytest.mark.slow
def test_a_running_training_records_when_it_is_asked(tmp_path: Path) -> None:
    """About 2 s."""
    from mt_core.config import load_config
    from mt_core.run_requests import RequestFolder, RunRequest, read_answer, write_request
    from mt_core.train import Callback, Trainer

    class Asks(Callback):
        def __init__(self) -> None:
            self.requests: list[RunRequest] = []

        def on_step_end(self, run: Any, metrics: Any) -> None:
            for step, steps in ((1, "6"), (2, "2"), (3, "1")):
                if metrics["iteration"] == step:
                    self.requests.append(write_request(run.directory.path, "profile", steps))

    RequestFolder.__init__.__defaults__ = (0.0,)
    asks = Asks()
    overrides = [*SMALL, *FEW, "train.train_iters=6", "train.eval_interval=null", "train.sample_prompt=null"]
    try:
        Trainer(load_config(preset="gpt-tiny", overrides=overrides), run_dir=tmp_path, callbacks=[asks]).train()
    finally:
        RequestFolder.__init__.__defaults__ = (1.0,)
    found = [answer for request in asks.requests if (answer := read_answer(tmp_path, request)) is not None]
    assert [answer.ok for answer in found] == [False, True, False]
    assert "the run is at step 1, with 5 left; N can be 1 to 5" in found[0].text
    # A second profiler in one process ends it without a word.
    assert "steps 3 to 4 are being recorded, and the run is at step 3; ask again after them" in found[2].text
    assert (tmp_path / "profile" / "steps-3-4" / "summary-rank-0.json").exists()

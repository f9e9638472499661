"""The gradients of supervised fine-tuning on conversations of unequal lengths are those of plain torch, however the
global batch is divided; every layout computes what one process computes. Costs about 40 CPU seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.covering import EXHAUSTIVE
from tests.tune.sft.chats import settings, write_chats

from mt_core.config.loading import load_config
from mt_core.data.building import build_train_data
from mt_core.nn.layout import parameter_layouts
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train.trainer import Trainer
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def record(rank: int, world: int, overrides: list[str]) -> RunRecord | None:
    torch.set_num_threads(1)
    host = load_plugins()
    result = record_run(load_config(preset="gpt-tiny", overrides=overrides, host=host), 2, host=host)
    return result if rank == 0 else None


def run(path: Path, world: int, *more: str) -> RunRecord:
    result = run_ranks(world, record, settings(path, *more))[0]
    assert isinstance(result, RunRecord)
    return result


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def plain_gradients(overrides: list[str], by_sequence: bool) -> dict[str, torch.Tensor]:
    """One conversation after the other through the model, without packing, padding or batches: the sum of the losses of
    answers over their number, or the mean over conversations of their means."""
    torch.set_num_threads(1)
    host = load_plugins()
    trainer = Trainer(load_config(preset="gpt-tiny", overrides=overrides, host=host), host=host)
    model, data = trainer.engine.model, build_train_data(trainer.config, trainer.engine.tokenizer, host)
    losses: list[torch.Tensor] = []
    for index in range(8):
        sample = {name: torch.from_numpy(array) for name, array in data[index].items()}
        for segment in sample["segment_ids"].unique():
            here = sample["segment_ids"] == segment
            counted = sample["loss_mask"][here] > 0
            if counted.any():
                logits = model(sample["tokens"][here][None])[0]
                losses.append(F.cross_entropy(logits[counted], sample["labels"][here][counted], reduction="none"))
    means = torch.stack([loss.mean() for loss in losses]) if by_sequence else torch.cat(losses)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(means.mean(), list(parameters.values()))
    layouts = parameter_layouts(model)
    return {name: layouts[name].to_canonical(g) for name, g in zip(parameters, gradients, strict=True)}


def require_close(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        off = (gradients[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert off < tolerance, f"{name}: {off:.1e}"


DIVISIONS = {"8,1,1": (8, 1), "1,8,1": (1, 1), "2,2,2": (2, 2)}
"""(micro-batch, accumulation, data-parallel ranks) -> (micro-batch, ranks), of a global batch of 8."""


@pytest.mark.parametrize("normalization", ["weights", "sequences"])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_gradients_are_those_of_plain_torch(chats: Path, normalization: str, packing: str) -> None:
    keys = (f"train.loss_normalization={normalization}", f"data.packing={packing}", "train.global_batch_size=8")
    expected = plain_gradients(settings(chats, "train.micro_batch_size=8", *keys), normalization == "sequences")
    for micro, ranks in DIVISIONS.values():
        found = run(chats, ranks, f"train.micro_batch_size={micro}", *keys)
        require_close(found.gradients, expected, 2e-5)


TP2, CP2, PP2 = (f"parallel.{axis}_parallel_size=2" for axis in ("tensor_model", "context", "pipeline_model"))
SP, ZERO = "parallel.sequence_parallel=true", "parallel.use_distributed_optimizer=true"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp": (2, (TP2,)),
    "tp+sp": (2, (TP2, SP)),
    "pp": (2, (PP2,)),
    "cp": (2, (CP2,)),
    "cp-a2a": (2, (CP2, "parallel.cp_comm_type=a2a")),
    "zero": (2, (ZERO,)),
    "fsdp": (2, ("parallel.use_torch_fsdp2=true",)),
    "zbv": (2, (PP2, "parallel.pipeline_schedule=zbv_zero_bubble", "model.num_layers=4")),
    "tp+zero": (4, (TP2, ZERO)),
    "tp+sp+cp": (4, (TP2, SP, CP2)),
    "tp+pp": (4, (TP2, PP2)),
    "cp+pp": (4, (CP2, PP2)),
}


IN_OTHERS = ("tp", "tp+sp", "cp", "zero", "tp+pp")
"""Layouts of which each axis, and each two of them, are in another."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EXHAUSTIVE if name in IN_OTHERS else ()) for name in LAYOUTS]
)
def test_packed_conversations_with_noise_in_every_layout(chats: Path, name: str) -> None:
    """With NEFTune and decayed rates, whose noise and factors then depend on no layout either."""
    world, layout = LAYOUTS[name]
    keys = (
        "train.micro_batch_size=2",
        "train.global_batch_size=8",
        "tune.neftune_noise_alpha=5",
        "tune.layer_lr_decay=0.8",
    )
    layers = tuple(key for key in layout if key.startswith("model."))
    alone, found = reference(chats, (*keys, *layers)), run(chats, world, *keys, *layout)
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    require_close(found.gradients, alone.gradients, 2e-5)
    require_close(found.weights, alone.weights, 1e-5)


_REFERENCES: dict[Any, RunRecord] = {}


def reference(chats: Path, keys: tuple[str, ...]) -> RunRecord:
    if (chats, keys) not in _REFERENCES:
        _REFERENCES[chats, keys] = run(chats, 1, *keys)
    return _REFERENCES[chats, keys]


def test_noise_and_rates_take_part(chats: Path) -> None:
    keys = ("train.micro_batch_size=2", "train.global_batch_size=8")
    plain = reference(chats, keys)
    noisy = reference(chats, (*keys, "tune.neftune_noise_alpha=5"))
    assert abs(noisy.losses[0] / plain.losses[0] - 1) > 1e-4
    decayed = reference(chats, (*keys, "tune.layer_lr_decay=0.5"))
    assert decayed.losses[0] == plain.losses[0]
    name = "embedding.word_embeddings.weight"
    assert not torch.allclose(decayed.weights[name], plain.weights[name])

"""Model transforms, and the one of train.frozen_parameters: against plain torch, in layouts, and after a resume."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig
from mt_core.errors import ConfigError
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.plugins import Plugin, load_plugins
from mt_core.specs import ModelTransformSpec
from mt_core.testing import run_ranks
from mt_core.train import Callback, Engine, Trainer

FROZEN = ("embedding.*", "decoder.layers.0.*", "*layernorm*")
STEPS = 3


def tiny(frozen: tuple[str, ...] = FROZEN, *overrides: str) -> LoadedConfig:
    small = ("num_layers=2", "hidden_size=16", "num_attention_heads=2", "max_position_embeddings=16")
    common = (
        "data.seq_length=16",
        "data.corpus_bytes=200000",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        f"train.train_iters={STEPS}",
    )
    keys = [f"model.{key}" for key in small] + list(common) + ["train.sample_prompt=null", "train.eval_interval=null"]
    return load_config(preset="gpt-tiny", overrides=[*keys, f"train.frozen_parameters={list(frozen)}", *overrides])


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def is_frozen(name: str) -> bool:
    return name.startswith(("embedding.", "decoder.layers.0.")) or "layernorm" in name


def test_frozen_parameters_stay_and_have_no_state() -> None:
    trainer = Trainer(tiny())
    before = weights(trainer.model)
    trainer.train()
    changed = {name for name, value in weights(trainer.model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not is_frozen(name)}
    assert all(parameter.grad is None for name, parameter in trainer.model.named_parameters() if is_frozen(name))
    assert len(trainer.engine.optimizer.state) == len(changed)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_steps_of_a_plain_module_are_those_of_torch() -> None:
    """AdamW of torch.optim over the other parameters alone, on a module that a program gives."""
    torch.manual_seed(0)
    batches = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(STEPS)]
    reference = TwoLayers()
    optimizer = torch.optim.AdamW(reference.second.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for x, y in batches:
        optimizer.zero_grad()
        (reference(x) - y).square().mean(dim=1).mean().backward()
        optimizer.step()
    keys = {
        "optimizer": {"lr": 0.01, "min_lr": 0.01, "adam_beta2": 0.95, "weight_decay": 0.0, "clip_grad": 0.0},
        "lr_schedule": {"lr_decay_style": "constant"},
        "train": {
            "frozen_parameters": ["first.*"],
            "train_iters": STEPS,
            "micro_batch_size": 4,
            "global_batch_size": 4,
        },
    }
    model = TwoLayers()

    def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean(dim=1)

    data = Samples(batches)
    Trainer(load_config(sections=keys), model=model, forward_step=losses, train_data=data, valid_data={}).train()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dict(reference.named_parameters())[name])
    assert torch.equal(model.first.weight, TwoLayers().first.weight)


class Samples:
    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.rows = [(x[i], y[i]) for x, y in batches for i in range(4)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.rows[index]
        return {"x": x.numpy(), "y": y.numpy()}

    def describe(self, index: int) -> str:
        return f"sample {index}"


LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "tensor and sequence": (2, ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")),
    "pipeline, tied embeddings": (2, ("parallel.pipeline_model_parallel_size=2",)),
    "distributed optimizer": (2, ("parallel.use_distributed_optimizer=true",)),
    "FSDP2": (2, ("parallel.use_torch_fsdp2=true",)),
}


class Steps(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_step_end(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.seen.append((metrics["loss"], metrics["grad_norm"]))


def loss_after(rank: int, world: int, overrides: tuple[str, ...]) -> tuple[float, float]:
    """The loss and gradient norm of the last step."""
    steps = Steps()
    Trainer(tiny(FROZEN, *overrides), callbacks=[steps]).train()
    return steps.seen[-1]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_the_same(layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    expected = loss_after(0, 1, ())
    for found in run_ranks(world, loss_after, overrides):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    whole = Trainer(tiny(), run_dir=tmp_path / "whole")
    whole.train()
    Trainer(tiny(FROZEN, "train.exit_iteration=2"), run_dir=tmp_path / "cut").train()
    second = Trainer(tiny(), run_dir=tmp_path / "cut")
    second.train()
    assert all(torch.equal(value, weights(whole.model)[name]) for name, value in weights(second.model).items())


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        (("embedding.*", "decoder.layer.0.*"), "train.frozen_parameters: no parameter has the name decoder.layer.0.*"),
        (("*",), "train.frozen_parameters leaves nothing to train"),
    ],
)
def test_wrong_patterns_are_named(frozen: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer(tiny(frozen))
    assert words in str(refused.value)


def doubles(config: Any) -> bool:
    return config.train.seed == 77


def doubled(model: nn.Module, config: Any, context: Any) -> nn.Module:
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def test_a_plugins_transform_is_applied_where_its_key_says_so() -> None:
    spec = ModelTransformSpec(
        name="doubled",
        doc="Doubles the output",
        applies=Lazy(f"{__name__}:doubles"),
        transform=Lazy(f"{__name__}:doubled"),
    )
    plugin = types.SimpleNamespace(mt_register_model_transforms=hookimpl(lambda: [spec]))

    def logits(seed: int, with_plugin: bool) -> Tensor:
        host = load_plugins()
        if with_plugin:
            host.add(plugin, Plugin("doubler", "tests", "doubler", "1.0"))
        engine = Engine.build(tiny((), f"train.seed={seed}", "train.loss=cross_entropy"), host=host)
        tokens = torch.arange(16).unsqueeze(0)
        with torch.no_grad():
            output: Tensor = engine.model(tokens)
        return output

    torch.testing.assert_close(logits(77, True), 2 * logits(77, False))
    assert torch.equal(logits(1, True), logits(1, False))

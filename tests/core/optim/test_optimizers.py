"""Our optimizers against those of torch.optim or their formulas, the groups they get, and what is not imported."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError, TrainingError
from mt_core.nn.kernels.reference.adamw import TorchAdamW
from mt_core.optim.configs import AdamConfig, LionConfig, SGDConfig
from mt_core.optim.fused_adamw import FusedAdamW
from mt_core.optim.optimizers import AdamW, build_adam, build_lion, build_sgd
from mt_core.optim.param_groups import GroupSchedules, param_groups, weight_decay_schedule
from mt_core.train.step.optimizer_step import set_learning_rate

CASES = {
    "adam": (
        build_adam,
        AdamConfig(lr=0.01, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, fused=False, foreach=False),
    ),
    "sgd": (
        build_sgd,
        SGDConfig(lr=0.01, sgd_momentum=0.7),
        lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.7, fused=False, foreach=False),
    ),
    "sgd without momentum": (
        build_sgd,
        SGDConfig(lr=0.01, sgd_momentum=0.0),
        lambda groups: torch.optim.SGD(groups, lr=0.01, fused=False, foreach=False),
    ),
}


def named_parameters() -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 7), "a.bias": (7,), "unused.weight": (2, 2), "norm.weight": (3,)}
    return [(name, torch.nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_torchs(case) -> None:
    build, config, reference_of = CASES[case]
    mine, theirs = named_parameters(), named_parameters()
    optimizer = build(config, param_groups(mine, 0.1))
    reference = reference_of(param_groups(theirs, 0.1))
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        for (name, a), (_, b) in zip(mine, theirs, strict=True):
            if name != "unused.weight":
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()
        reference.step()
    for (_, a), (_, b) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        for key, value in reference.state[b].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(optimizer.state[a][key], value, atol=1e-6, rtol=1e-5)


# -- Lion ----------------------------------------------------------------------------------------


def test_lion_is_its_formula() -> None:
    """Element by element, in Python's floats."""
    mine = named_parameters()
    optimizer = build_lion(LionConfig(lr=0.01, lion_beta1=0.9, lion_beta2=0.8), param_groups(mine, 0.1))
    weights = {name: parameter.flatten().tolist() for name, parameter in mine}
    moments = {name: [0.0] * len(values) for name, values in weights.items()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for name, parameter in mine:
            if name == "unused.weight":
                continue
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            decay = 0.1 if name == "a.weight" else 0.0
            for i, g in enumerate(parameter.grad.flatten().tolist()):
                direction = math.copysign(1.0, 0.9 * moments[name][i] + 0.1 * g)
                weights[name][i] = weights[name][i] * (1 - 0.01 * decay) - 0.01 * direction
                moments[name][i] = 0.8 * moments[name][i] + 0.2 * g
        optimizer.step()
    for name, parameter in mine:
        torch.testing.assert_close(parameter.flatten(), torch.tensor(weights[name]), atol=1e-6, rtol=0)
        if name != "unused.weight":
            moment = optimizer.state[parameter]["exp_avg"].flatten()
            torch.testing.assert_close(moment, torch.tensor(moments[name]), atol=1e-6, rtol=0)
    assert optimizer.state[dict(mine)["unused.weight"]] == {}


def test_lion_moves_by_the_learning_rate_whatever_the_size_of_the_gradient() -> None:
    """|w - 3| from 0 by steps of 0.1: 30 of them, whatever the slope."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = build_lion(LionConfig(lr=0.1), param_groups([("w.bias", weight)], 0.0))
    for _ in range(30):
        weight.grad = 1e-9 * torch.sign(weight.detach() - 3.0)
        optimizer.step()
    assert weight.item() == pytest.approx(3.0, abs=1e-4)


def test_lion_leaves_alone_what_never_had_a_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = build_lion(LionConfig(lr=0.1), param_groups([("w.bias", weight)], 0.0))
    weight.grad = torch.tensor([0.0, 1.0, -1.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([1.0, 0.9, 1.1])


# -- groups --------------------------------------------------------------------------------------


def test_the_embedding_and_the_output_layer_are_groups_of_their_own() -> None:
    names = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias", "mlp.weight")
    named = [(name, torch.nn.Parameter(torch.ones(2, 2) if "weight" in name else torch.ones(2))) for name in names]
    found = [(g["names"], g["is_decoupled_lr"], g["wd_mult"]) for g in param_groups(named, 0.1, decoupled=True)]
    assert found == [
        (["mlp.weight"], False, 1.0),
        (["output_layer.bias"], False, 0.0),
        (["embedding.word_embeddings.weight", "output_layer.weight"], True, 1.0),
    ]
    assert [len(group["names"]) for group in param_groups(named, 0.1)] == [3, 1]


def test_a_factor_of_the_learning_rate_makes_a_group() -> None:
    named = [(name, torch.nn.Parameter(torch.ones(2, 2))) for name in ("a.weight", "b.weight", "c.weight")]
    groups = param_groups(named, 0.1, rates={"a.weight": 4.0, "c.weight": 1.0})
    factors = [(group["names"], group.get("lr_mult")) for group in groups]
    assert factors == [(["b.weight", "c.weight"], None), (["a.weight"], 4.0)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_factor_of_epsilon_is_that_of_its_group(fused: bool) -> None:
    """A first step of Adam moves by lr g / (|g| + eps)."""
    named = [(name, torch.nn.Parameter(torch.ones(2, 2))) for name in ("a.weight", "b.weight")]
    groups = param_groups(named, 0.0, epsilons={"a.weight": 0.25})
    assert [(group["names"], group.get("eps_mult")) for group in groups] == [(["b.weight"], None), (["a.weight"], 0.25)]
    options = (1.0, 0.9, 0.95, 1.0)
    optimizer = FusedAdamW(groups, *options, TorchAdamW()) if fused else AdamW(groups, *options)
    for _, parameter in named:
        parameter.grad = torch.ones(2, 2)
    optimizer.step()
    moved = {name: 1.0 - parameter[0, 0].item() for name, parameter in named}
    assert moved == pytest.approx({"a.weight": 1 / 1.25, "b.weight": 1 / 2})


def test_groups_follow_schedules_of_their_own() -> None:
    named = [(name, torch.nn.Parameter(torch.ones(2, 2))) for name in ("output_layer.weight", "mlp.weight")]
    named.append(("mlp.bias", torch.nn.Parameter(torch.ones(2))))
    groups = param_groups(named, 0.0, decoupled=True)
    GroupSchedules(lambda consumed: consumed / 100, lambda consumed: consumed / 10).prepare(groups, 5)
    found = {group["names"][0]: (group.get("decoupled_lr"), group["weight_decay"]) for group in groups}
    assert found == {"mlp.weight": (None, 0.5), "mlp.bias": (None, 0.0), "output_layer.weight": (0.05, 0.5)}


@pytest.mark.parametrize(("style", "quarter", "half"), [("linear", 0.15, 0.2), ("cosine", None, 0.2)])
def test_weight_decay_rises_over_the_training(style, quarter, half) -> None:
    config = AdamConfig(weight_decay_incr_style=style, start_weight_decay=0.1, end_weight_decay=0.3)
    weight_decay = weight_decay_schedule(config, 1000)
    if quarter is None:
        quarter = 0.1 + 0.2 * (1 - math.cos(math.pi / 4)) / 2
    for consumed, expected in ((0, 0.1), (250, quarter), (500, half), (1000, 0.3), (2000, 0.3)):
        assert weight_decay(consumed) == pytest.approx(expected)


def test_constant_weight_decay_has_no_schedule() -> None:
    assert weight_decay_schedule(AdamConfig(), 1000) is None


SMALL = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "train.global_batch_size=4",
    "train.micro_batch_size=4",
    "train.train_iters=4",
    "train.eval_iters=0",
    "train.sample_prompt=null",
    "checkpoint.save_interval=null",
    "logging.progress=none",
)


def trained(*more: str):
    from mt_core.train import Trainer

    trainer = Trainer(load_config(preset="gpt-tiny", overrides=[*SMALL, *more]))
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    return trainer, moved


def test_a_decoupled_learning_rate_of_zero_moves_all_but_the_embedding() -> None:
    untied = "model.untie_embeddings_and_output_weights=true"
    trainer, moved = trained(untied, "optimizer.min_lr=0", "optimizer.decoupled_lr=0")
    still = {name for name, _ in trainer.model.named_parameters()} - moved
    assert still == {"embedding.word_embeddings.weight", "output_layer.weight"}


def test_the_decoupled_learning_rate_has_the_form_of_the_schedule() -> None:
    """A line from 0.01 to 0.002 over 16 samples beside one from 0.1 to 0; the last step starts after 12."""
    rates = (
        "optimizer.lr=0.1",
        "optimizer.min_lr=0",
        "optimizer.decoupled_lr=0.01",
        "optimizer.decoupled_min_lr=0.002",
    )
    trainer, _ = trained("lr_schedule.lr_decay_style=linear", "lr_schedule.lr_warmup_iters=0", *rates)
    found = {group["is_decoupled_lr"]: group["lr"] for group in trainer.engine.optimizer.param_groups}
    assert found == {False: pytest.approx(0.1 * 0.25), True: pytest.approx(0.002 + 0.008 * 0.25)}


def test_a_rate_that_diverges_is_named() -> None:
    """Decay of 0.1 at a rate of 1000 makes each weight -99 times as large at each step."""
    rates = ("optimizer.lr=1000", "optimizer.min_lr=1000", "optimizer.weight_decay=0.1", "train.train_iters=30")
    with pytest.raises(TrainingError, match=r"is not finite at iteration \d+ .*lower optimizer\.lr"):
        trained("lr_schedule.lr_warmup_iters=0", *rates)


def test_weight_decay_of_the_last_step_is_used() -> None:
    decay = ("optimizer.weight_decay_incr_style=linear", "optimizer.start_weight_decay=0.0")
    trainer, _ = trained(*decay, "optimizer.end_weight_decay=0.4")
    assert sorted(group["weight_decay"] for group in trainer.engine.optimizer.param_groups) == [0.0, pytest.approx(0.3)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("decoupled_min_lr=0.1",), "decoupled_min_lr=0.1 needs optimizer.decoupled_lr, which is not set"),
        (("decoupled_lr=0.1", "decoupled_min_lr=0.2"), "decoupled_min_lr=0.2 is above optimizer.decoupled_lr=0.1"),
        (("min_lr=0.001", "decoupled_lr=1e-5"), "min_lr=0.001 is above optimizer.decoupled_lr=1e-05; set"),
        (("weight_decay_incr_style=linear", "end_weight_decay=1.0"), "linear needs optimizer.start_weight_decay"),
        (("start_weight_decay=0.1",), "it only counts when optimizer.weight_decay_incr_style is linear or cosine"),
        (("weight_decay_incr_style=cubic",), "weight_decay_incr_style"),
    ],
)
def test_what_cannot_be_is_refused(overrides, words) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(preset="gpt-tiny", overrides=[f"optimizer.{override}" for override in overrides])
    assert words in str(raised.value)


# -- imports -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_step_of_training_does_not_import_torchs_compiler() -> None:
    """It takes seconds to import, in every process."""
    program = """
import sys
from mt_core.config import load_config
from mt_core.train import Trainer
small = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "data.seq_length=16"]
small += ["data.corpus_bytes=1000000", "train.train_iters=1", "train.eval_iters=0", "logging.progress=none"]
Trainer(load_config(preset="gpt-tiny", overrides=small)).train()
print([name for name in ("torch._dynamo", "torch._inductor", "transformers", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

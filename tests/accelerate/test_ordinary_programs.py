"""Programs without the plugin's own objects: torch's schedulers, accumulation, groups with and without decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerate.programs import build, samples
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from mt_accelerate import Accelerator, MegatronLMPlugin
from mt_accelerate.megatron_lm.optimizers import undecayed_names
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins

NO_DECAY = ("bias", "LayerNorm.weight", "layer_norm.weight")
"""As transformers' examples have it."""


def usual_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    spared = [p for n, p in named if any(part in n for part in NO_DECAY)]
    return [
        {"params": [p for n, p in named if not any(part in n for part in NO_DECAY)], "weight_decay": 0.1},
        {"params": spared, "weight_decay": 0.0},
    ]


def all_in_one(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), "weight_decay": 0.1}]


def losses_of(family: str, groups: Callable[..., Any], accelerator: Any, accumulated: int) -> list[float]:
    """Of a program that knows no layout. accelerator: None for plain torch."""
    model = build(family).eval()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    loader: Any = DataLoader(samples(family, 20), batch_size=4)
    if accelerator is not None:
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        model.train() if accelerator.state.megatron_lm_plugin else model.eval()
    losses = []
    for number, batch in enumerate(loader, 1):
        if accelerator is None:
            loss = model(**batch).loss
            (loss / accumulated).backward()
            if number % accumulated == 0 or number == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        else:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("with_plugin", [True, False])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("family", "groups"), [("gpt2", all_in_one), ("gpt2", usual_groups), ("t5", usual_groups), ("bert", usual_groups)]
)
def test_the_losses_are_those_of_torch(family: str, groups: Any, accumulated: int, with_plugin: bool) -> None:
    plugin = MegatronLMPlugin() if with_plugin else None
    accelerator = Accelerator(megatron_lm_plugin=plugin, gradient_accumulation_steps=accumulated, cpu=True)
    expected = losses_of(family, groups, None, accumulated)
    assert losses_of(family, groups, accelerator, accumulated) == pytest.approx(expected, rel=2e-5)


class ByHand:
    """A program without a scheduler, which sets the rates of the groups in its loop."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.rates = optimizer, iter([3e-3, 2e-2, 1e-3, 5e-3, 1e-2])

    def step(self) -> None:
        rate = next(self.rates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": partial(StepLR, step_size=2, gamma=0.3),
    "CosineAnnealingLR": partial(CosineAnnealingLR, T_max=4),
    # It raises an error when it is moved past its end.
    "OneCycleLR": partial(OneCycleLR, max_lr=2e-2, total_steps=4, cycle_momentum=False),
    # No loss is as much better as the threshold asks for.
    "ReduceLROnPlateau": partial(ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.99),
}


def rates_left(scheduler: Any) -> bool:
    """Of OneCycleLR, which cannot be moved past its end."""
    return getattr(scheduler, "_step_count", 0) <= getattr(scheduler, "total_steps", math.inf)


def with_plugin() -> Accelerator:
    return Accelerator(megatron_lm_plugin=MegatronLMPlugin(), cpu=True)


def losses_by_rates(kind: Callable[[Any], Any], accelerator: Any, *, late: bool = False) -> list[float]:
    """kind: what sets the rates, given the optimizer. late: it is made with the prepared optimizer, and not prepared
    itself. accelerator: None for plain torch."""
    model = build("gpt2").eval()
    optimizer: Any = torch.optim.AdamW(usual_groups(model), lr=1e-2)
    loader: Any = DataLoader(samples("gpt2", 20), batch_size=4)
    given = [] if late else [kind(optimizer)]
    if accelerator is not None:
        model, optimizer, loader, *given = accelerator.prepare(model, optimizer, loader, *given)
        model.train()
    rates = given[0] if given else kind(optimizer)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        if accelerator is not None:
            accelerator.backward(loss)
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator is not None or rates_left(rates):
            rates.step(*[losses[-1]] if hasattr(rates, "patience") else [])
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_set_the_rates(name: str) -> None:
    expected = losses_by_rates(SCHEDULERS[name], None)
    assert losses_by_rates(SCHEDULERS[name], with_plugin()) == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByHand, SCHEDULERS["StepLR"]])
def test_what_is_not_prepared_sets_the_rates(kind: Callable[[Any], Any]) -> None:
    """The program in its loop, and a scheduler that is made with the prepared optimizer."""
    expected = losses_by_rates(kind, None)
    assert losses_by_rates(kind, with_plugin(), late=True) == pytest.approx(expected, rel=2e-5)


def losses_and_norms(accelerator: Any, sum_of_tokens: bool, steps: int = 3) -> list[tuple[float, float]]:
    """(sum of a step's losses, norm of its gradients) of a program that sums two batches itself. sum_of_tokens: the
    loss is divided by the tokens of both batches, and not each by its own. accelerator: None for plain torch."""
    model = build("gpt2").eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(samples("gpt2", 24), batch_size=4)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model.train() if accelerator.state.megatron_lm_plugin else model.eval()
    batches, found = iter(loader), []
    for _ in range(steps):
        pair = [next(batches), next(batches)]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in pair)
        options = {"num_items_in_batch": count} if sum_of_tokens else {}
        total = 0.0
        for number, batch in enumerate(pair):
            waits = accelerator is not None and not sum_of_tokens and number == 0
            with accelerator.no_sync(model) if waits else nullcontext():
                loss = model(**batch, use_cache=False, **options).loss * (1.0 if sum_of_tokens else 0.5)
                loss.backward() if accelerator is None else accelerator.backward(loss)
            total += loss.item()
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        found.append((total, clip(model.parameters(), 1.0).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("with_plugin", [True, False])
@pytest.mark.parametrize("sum_of_tokens", [True, False])
def test_a_program_that_sums_batches_itself_has_the_losses_of_torch(sum_of_tokens: bool, with_plugin: bool) -> None:
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin() if with_plugin else None, cpu=True)
    ours, theirs = (losses_and_norms(one, sum_of_tokens) for one in (accelerator, None))
    assert torch.tensor(ours) == pytest.approx(torch.tensor(theirs), rel=2e-5)


@pytest.mark.slow
def test_sums_of_a_program_that_cannot_be_computed_are_refused() -> None:
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(), cpu=True)
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples("gpt2", 8), batch_size=4))
    batch = next(iter(loader))
    with model.no_sync():
        first = model(**batch).loss
    second = model(**batch).loss
    with pytest.raises(ConfigError, match="2 calls of the model and 0 of backward"):
        optimizer.step()
    # The step is over, and weights are as they were.
    model.eval()
    assert model(**batch).loss.item() == first.item() == second.item()
    model.train()
    for factor in (0.5, 0.25):
        with accelerator.no_sync(model):
            accelerator.backward(model(**batch).loss * factor)
    with pytest.raises(ConfigError, match=r"losses of one step by 0.25, 0.5"):
        optimizer.step()
    with accelerator.no_sync(model):
        accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ConfigError, match="clip_grad_norm_ has updated the weights"), model.no_sync():
        model(**batch)


@pytest.mark.slow
def test_a_program_draws_the_numbers_that_follow_from_its_seed() -> None:
    """With the engine's, a second model and its order of samples would be others than without mt."""

    def drawn(accelerator: Any) -> list[float]:
        model: Any = build("gpt2").eval()  # torch's dropout would draw, too
        torch.manual_seed(7)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(samples("gpt2", 8), batch_size=4, shuffle=True)
        if accelerator is not None:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found = [torch.rand(()).item()]
        for batch in loader:
            model(**batch)
            found += [torch.rand(()).item(), float(batch["input_ids"].sum())]
        if accelerator is not None:
            accelerator.free_memory()
        return [*found, torch.rand(()).item()]

    plugin = MegatronLMPlugin(hidden_dropout=0.1)
    assert drawn(Accelerator(megatron_lm_plugin=plugin, cpu=True)) == drawn(None)


def test_names_without_decay_follow_the_programs_groups() -> None:
    host = load_plugins()
    gpt2, t5, llama = build("gpt2"), build("t5"), build("llama")
    assert undecayed_names(gpt2, all_in_one(gpt2), host) == []
    # relative_attention_bias is a matrix whose name has "bias".
    found = undecayed_names(t5, usual_groups(t5), host)
    assert found is not None
    assert [name for name in found if "relative_attention_bias" in name]
    by_shape = [
        {"params": [p for p in llama.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in llama.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    assert undecayed_names(llama, by_shape, host) is None


def test_a_state_of_a_plain_module_continues_where_it_was(tmp_path: Path) -> None:
    def start() -> tuple[Any, ...]:
        torch.manual_seed(3)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)

    def step(accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> float:
        loss = model(torch.randn(4, 3)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(loss)

    first = start()
    step(*first)
    first[0].save_state(str(tmp_path))
    expected = [step(*first) for _ in range(3)]
    second = start()
    second[0].load_state(str(tmp_path))
    assert [step(*second) for _ in range(3)] == expected

"""What a script saves and loads beside the model, and options of Megatron's that say what the model has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerate.programs import build, samples
from torch.utils.data import DataLoader

from mt_accelerate import Accelerator, MegatronLMPlugin
from mt_accelerate.megatron_lm.configuration import other_sections
from mt_accelerate.megatron_lm.optimizers import shortened
from mt_core.errors import CheckpointError, ConfigError

STEPS = 4


def prepared(scheduler: bool = True) -> tuple[Accelerator, Any, Any, Any]:
    """With a scheduler of torch, whose rates differ in each step."""
    accelerator, model = Accelerator(megatron_lm_plugin=MegatronLMPlugin(), cpu=True), build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)] if scheduler else []
    model, _, loader, *schedule = accelerator.prepare(
        model, optimizer, DataLoader(samples("gpt2", 2 * STEPS), batch_size=2), *schedule
    )
    return accelerator, model, loader, schedule[0] if schedule else None


def train(model: Any, scheduler: Any, batches: list[Any]) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(model(**batch).loss.item())
        scheduler.step()
    return losses


@pytest.mark.slow
def test_a_state_has_the_rates_of_the_programs_scheduler(tmp_path: Path) -> None:
    accelerator, model, loader, scheduler = prepared()
    batches = list(loader)
    train(model, scheduler, batches[: STEPS // 2])
    accelerator.save_state(str(tmp_path / "state"))
    undisturbed = train(model, scheduler, batches[STEPS // 2 :])

    again, model, loader, scheduler = prepared()
    again.load_checkpoint(str(tmp_path / "state"))
    assert scheduler.get_last_lr() == [1e-2 * 0.5**2]
    assert train(model, scheduler, batches[STEPS // 2 :]) == undisturbed
    assert model.iteration == STEPS


@pytest.mark.slow
def test_a_state_has_the_rate_that_the_program_has_set(tmp_path: Path) -> None:
    """As the state of an optimizer of torch."""

    def started() -> tuple[Accelerator, Any]:
        accelerator, model = Accelerator(megatron_lm_plugin=MegatronLMPlugin(), cpu=True), build("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        _, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(samples("gpt2", 2), batch_size=2))
        return accelerator, optimizer

    accelerator, optimizer = started()
    optimizer.param_groups[0]["lr"] = 3e-4
    accelerator.save_state(str(tmp_path))
    accelerator, optimizer = started()
    accelerator.load_state(str(tmp_path))
    assert optimizer.param_groups[0]["lr"] == 3e-4


@pytest.mark.slow
def test_a_state_without_the_scheduler_is_refused(tmp_path: Path) -> None:
    """Its rates would begin again."""
    accelerator, *_ = prepared(scheduler=False)
    accelerator.save_state(str(tmp_path))
    with pytest.raises(CheckpointError, match="program_scheduler"):
        prepared()[0].load_state(str(tmp_path))


BLOOM = {"family": "gpt", "position_embedding_type": "alibi", "num_attention_heads": 4}
STARCODER = {**BLOOM, "position_embedding_type": "learned_absolute", "num_query_groups": 1}


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (BLOOM, {"position_embedding_type": "alibi", "attention_head_type": "multihead"}),
        (STARCODER, {"position_embedding_type": "absolute", "attention_head_type": "multiquery"}),
        ({**BLOOM, "position_embedding_type": "rope"}, {"position_embedding_type": "rotary"}),
    ],
)
def test_options_of_accelerates_page_say_what_the_model_has(model: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert other_sections(arguments, model) == {}


@pytest.mark.parametrize(
    ("model", "name", "value", "has"),
    [
        (STARCODER, "position_embedding_type", "alibi", "learned_absolute"),
        (BLOOM, "attention_head_type", "multiquery", "multihead"),
    ],
)
def test_another_option_than_the_models_is_an_error(model: dict[str, Any], name: str, value: str, has: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value}', and the model has {has}; prepare a model that has it"):
        other_sections({name: value}, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "multiquery"])
def test_a_model_with_the_option_is_trained(name: str) -> None:
    from transformers import BloomConfig, BloomForCausalLM, GPTBigCodeConfig, GPTBigCodeForCausalLM

    if name == "alibi":
        arguments = {"position_embedding_type": "alibi", "attention_head_type": "multihead"}
        model = BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4, eos_token_id=2))
    else:
        arguments = {"position_embedding_type": "absolute", "attention_head_type": "multiquery"}
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 64, "n_positions": 16, "vocab_size": 96}
        model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, multi_query=True, bos_token_id=0, eos_token_id=2))
    reference = copy.deepcopy(model).eval()
    plugin = MegatronLMPlugin(other_megatron_args=arguments)
    model, _, loader = Accelerator(megatron_lm_plugin=plugin, cpu=True).prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(samples("gpt2", 4), batch_size=2)
    )
    first, second = loader
    assert model(**first).loss.item() == pytest.approx(reference(**first).loss.item(), rel=1e-5)
    step(reference, first)
    assert model(**second).loss.item() == pytest.approx(reference(**second).loss.item(), rel=1e-4)


def step(model: Any, batch: Any) -> None:
    """One step of plain torch, with the gradients clipped to 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_names_of_all_layers_are_one_pattern() -> None:
    names = {f"decoder.layers.{number}.mlp.linear_fc1.bias" for number in range(3)}
    assert shortened(names, []) == ["decoder.layers.*.mlp.linear_fc1.bias"]
    # Where a layer differs the names stay.
    assert shortened({"decoder.layers.0.mlp.bias"}, ["decoder.layers.1.mlp.bias"]) == ["decoder.layers.0.mlp.bias"]

"""Scripts for Accelerate's Megatron-LM plugin compute what transformers and plain torch do, under every layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.accelerate import programs
from tests.accelerate.programs import DECAY, FAMILIES, GLOBAL_BATCH, KEY_TOKENS, LR, STEPS, TOTAL
from tests.accelerate.transformers_ranks import TransformersRanks
from tests.dist.in_turn import Call, called, one_after_another
from torch import Tensor

from mt_accelerate.utils import BertTrainStep, T5TrainStep

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tp_degree": 2, "sequence_parallelism": True},
    "PP 2": {"pp_degree": 2},
    "DP 2": {},
    "ZeRO-1 over 2": {"use_distributed_optimizer": True},
    "FSDP2 over 2": {"use_custom_fsdp": True},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return programs.everything(0, 1, ({}, str(tmp_path_factory.mktemp("alone"))))


def plain_training(model: Any, batches: list[dict[str, Tensor]], loss_of: Any) -> list[float]:
    """AdamW with decay of everything, a rate that falls to 0 along a line, gradients clipped to 1."""
    model.eval()  # no dropout, as the plugin's default
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / TOTAL)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches_of(family: str) -> list[dict[str, Tensor]]:
    rows = programs.samples(family)
    cuts = [rows[first : first + GLOBAL_BATCH] for first in range(0, STEPS * GLOBAL_BATCH, GLOBAL_BATCH)]
    return [{name: torch.stack([row[name] for row in cut]) for name in cut[0]} for cut in cuts]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_script_has_the_losses_of_transformers_and_torch(alone, family: str) -> None:
    model, batches = programs.build(family), batches_of(family)
    reference = plain_training(model, batches, lambda model, batch: model(**batch).loss)
    assert alone[family]["losses"] == pytest.approx(reference, rel=2e-5)
    with torch.no_grad():
        output = model(**batches[0])
    assert alone[family]["evaluated"] == pytest.approx(output.loss.item(), rel=2e-5)
    rows = sorted(zip(batches[0]["input_ids"].tolist(), output.logits[:, 0, :5].tolist(), strict=True))
    torch.testing.assert_close(
        torch.tensor(alone[family]["logits"]), torch.tensor([row for _, row in rows]), rtol=1e-3, atol=1e-4
    )
    assert alone[family]["restored"] == alone[family]["evaluated"]
    assert alone[family]["size"] == GLOBAL_BATCH


def weighted_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over micro-batches of the guide's loss, each over its samples."""
    logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    each = losses.sum(1) / (labels != -100).sum(1)
    weights = 1 + 0.5 * torch.isin(batch["input_ids"], torch.tensor(KEY_TOKENS)).sum(1)
    return (each * weights).mean()


@pytest.mark.slow
def test_a_loss_of_the_program_is_what_is_trained_on(alone) -> None:
    reference = plain_training(programs.build("gpt2"), batches_of("gpt2"), weighted_loss)
    assert alone["custom"]["losses"] == pytest.approx(reference, rel=2e-5)
    assert alone["custom"]["reported"] == pytest.approx(reference, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "step"), [("bert of pairs", BertTrainStep), ("t5", T5TrainStep)])
def test_the_steps_of_encoders_take_the_mean_of_micro_batches(family: str, step: type) -> None:
    _, model, _, loader, _ = programs.start(family, {}, 1, custom_train_step_class=step)
    batch, reference = batches_of(family)[0], programs.build(family).eval()
    halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 4), slice(4, 8))]
    with torch.no_grad():
        expected = sum(reference(**half).loss.item() for half in halves) / 2
    assert model(**next(iter(loader))).loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_generation_continues_with_the_trained_weights(alone) -> None:
    model = programs.build("llama")
    plain_training(model, batches_of("llama"), lambda model, batch: model(**batch).loss)
    for row, prompt in zip(alone["generated"], ([5, 6, 7, 8], [9, 10, 11]), strict=True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 4:
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert row[: len(tokens)] == tokens


PROVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("gpt2", fields) for name, fields in LAYOUTS.items()},
    "interleaved PP 2": ("gpt2", {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}),
    "CP 2": ("gpt2", {"context_parallel_size": 2}),
    "EP 2": ("mixtral", {"expert_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def transformers_ranks() -> Iterator[TransformersRanks]:
    ranks = TransformersRanks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def on_two_ranks(
    transformers_ranks: TransformersRanks, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What each of two ranks finds under every layout, with its own model and data and with those of the program."""
    folder = tmp_path_factory.mktemp("ranks")
    calls: list[Call] = [(programs.everything, (fields, str(folder / name))) for name, fields in LAYOUTS.items()]
    calls.append((programs.all_provided, PROVIDED))
    of_ranks = transformers_ranks.run(2, one_after_another, called, calls, timeout=480)
    return [(dict(zip(LAYOUTS, found, strict=True)), provided) for *found, provided in of_ranks]


@pytest.fixture(scope="module")
def on_ranks(on_two_ranks: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [found for found, _ in on_two_ranks]


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(alone, on_ranks, layout: str) -> None:
    ranks = [found[layout] for found in on_ranks]
    families = [family for family in FAMILIES if family in ranks[0]]
    for number, found in enumerate(ranks):
        for family in families:
            for key in ("losses", "norms", "evaluated"):
                assert found[family][key] == pytest.approx(alone[family][key], rel=1e-4), (layout, family, key)
            assert found[family]["restored"] == pytest.approx(found[family]["evaluated"], rel=1e-6)
            assert found[family]["main"] == (number == 1)
        for key in ("losses", "reported"):
            if found["custom"][key]:
                assert found["custom"][key] == pytest.approx(alone["custom"][key], rel=1e-4)
        assert found["own batches"] == pytest.approx(alone["own batches"], rel=1e-4)
        assert sorted(found["samples"]) == list(range(21))
        assert found["generated"] in (None, alone["generated"])
    last = ranks[1]
    for family in families:
        shown = torch.tensor(last[family]["logits"])
        torch.testing.assert_close(shown, torch.tensor(alone[family]["logits"]), rtol=1e-2, atol=1e-3)
    assert last["custom"]["reported"]
    assert (ranks[0]["gpt2"]["logits"] is None) == (layout == "PP 2")


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("families", [("gpt2", "t5"), pytest.param(FAMILIES, marks=pytest.mark.exhaustive)])
def test_tensor_and_pipeline_parallelism_together_have_the_losses_of_one_process(
    alone, transformers_ranks, tmp_path, families
) -> None:
    fields = {"tp_degree": 2, "sequence_parallelism": True, "pp_degree": 2}
    expected = {family: alone[family]["losses"] for family in families}
    expected |= {"custom": alone["custom"]["losses"], "own batches": alone["own batches"]}
    ranks = transformers_ranks.run(4, programs.families_and_styles, families, fields, str(tmp_path), timeout=300)
    for found in ranks:
        for name, losses in expected.items():
            if found[name]:  # a loss of the program's own is known on the last stage
                assert found[name] == pytest.approx(losses, rel=1e-4), name


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_script_has_the_losses_of_mt_train_to_the_last_bit(alone, on_ranks, layout: str) -> None:
    for found in (alone, *(of_rank[layout] for of_rank in on_ranks)):
        assert found["gpt2"]["losses"] == found["mt train"]


@pytest.mark.dist
@pytest.mark.slow
def test_models_and_data_sets_of_a_program_train_the_same_under_every_layout(on_two_ranks) -> None:
    alone = programs.all_provided(0, 1, {family: (family, {}) for family in ("gpt2", "mixtral")})
    for _, found in on_two_ranks:
        for name, (family, _) in PROVIDED.items():
            assert found[name] == pytest.approx(alone[family], rel=1e-4), name
        assert "context_parallel_size=2: no process has the logits of a whole sequence" in found["refused"]

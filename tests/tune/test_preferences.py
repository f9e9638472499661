"""Training by preferences: formulas, gradients against plain torch, the reference, layouts, resumes, bad records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.tune.preference_runs import PAIRS, config, write_pairs
from torch import Tensor

from mt_core.errors import CheckpointError, ConfigError, DataError, TrainingError
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_data.preprocess.readers import Record
from mt_tune.preferences.pair_losses import PAIR_LOSSES, PairOptions, Pairs
from mt_tune.preferences.records import PairReader

# -- formulas, of one pair, by math ------------------------------------------------------------------

CHOSEN, REJECTED, NC, NR, REF_C, REF_R = -7.0, -9.5, 4, 5, -8.0, -8.5
RC, RR = CHOSEN - REF_C, REJECTED - REF_R
MATCHED = {
    name: tuple(torch.tensor([x], dtype=torch.float64) for x in values)
    for name, values in {"aot": (REF_C - REF_R, 0.0), "aot_unpaired": (RR, RC)}.items()
}
ONE = Pairs(*(torch.tensor([x], dtype=torch.float64) for x in (CHOSEN, REJECTED, NC, NR, REF_C, REF_R)), MATCHED)
B, E = 0.3, 0.1


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(mean: float) -> float:
    p = math.exp(mean)
    return p / (1 - p)


Q = s(B * (RC - RR))
BY_HAND = {
    "sigmoid": -(1 - E) * math.log(Q) - E * math.log(1 - Q),
    "robust": (-(1 - E) * math.log(Q) + E * math.log(1 - Q)) / (1 - 2 * E),
    "sigmoid_norm": -math.log(s(B * (RC / NC - RR / NR))),
    "hinge": max(0.0, 1 - B * (RC - RR)),
    "ipo": (RC / NC - RR / NR - 1 / (2 * B)) ** 2,
    "exo_pair": Q * math.log(Q / (1 - E)) + (1 - Q) * math.log((1 - Q) / E),
    "nca_pair": -math.log(s(B * RC)) - 0.5 * math.log(s(-B * RC)) - 0.5 * math.log(s(-B * RR)),
    "bco_pair": -math.log(s(B * RC)) - math.log(s(-B * RR)),
    "sppo_hard": (RC - 1 / (2 * B)) ** 2 + (RR + 1 / (2 * B)) ** 2,
    "apo_zero": 1 - s(B * RC) + s(B * RR),
    "apo_down": s(B * RC) + 1 - s(B * (RC - RR)),
    "discopop": -math.log(Q) * (1 - s(B * (RC - RR) / 0.05)) + math.exp(-B * (RC - RR)) * s(B * (RC - RR) / 0.05),
    # Of one pair: the ratios of equal rank are its own.
    "aot": -(1 - E) * math.log(Q) - E * math.log(1 - Q),
    "aot_unpaired": -(1 - E) * math.log(Q) - E * math.log(1 - Q),
    "sft": -CHOSEN / NC,
    "orpo": -CHOSEN / NC - B * math.log(s(math.log(odds(CHOSEN / NC) / odds(REJECTED / NR)))),
    "simpo": -(1 - E) * math.log(s(B * (CHOSEN / NC - REJECTED / NR) - 0.5))
    - E * math.log(s(-B * (CHOSEN / NC - REJECTED / NR) + 0.5)),
    "cpo": -(1 - E) * math.log(s(B * (CHOSEN - REJECTED)))
    - E * math.log(s(-B * (CHOSEN - REJECTED)))
    - 2.0 * CHOSEN / NC,
}


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_loss_by_its_formula(name: str) -> None:
    found = PAIR_LOSSES[name](ONE, PairOptions(beta=B, label_smoothing=E, gamma=0.5, nll_weight=2.0))
    assert float(found) == pytest.approx(BY_HAND[name], rel=1e-12)


def test_the_policy_that_is_the_reference_has_ln_2() -> None:
    same = Pairs(ONE.chosen, ONE.rejected, ONE.chosen_tokens, ONE.rejected_tokens, ONE.chosen, ONE.rejected)
    assert float(PAIR_LOSSES["sigmoid"](same, PairOptions())) == pytest.approx(math.log(2))


# -- records -----------------------------------------------------------------------------------------

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5"))
)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "4", "rejected": "5"},
        {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {
            "conversations": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
    ],
)
def test_records_that_people_have_are_the_same_pair(fields: dict[str, Any]) -> None:
    pair = PairReader().example(Record(fields, "pairs.jsonl", 3))
    assert [[dict(turn) for turn in side.messages] for side in (pair.chosen, pair.rejected)] == [  # type: ignore[union-attr]
        [USER, GOOD],
        [USER, BAD],
    ]


def test_texts_have_their_common_beginning_as_prompt() -> None:
    pair = PairReader().example(Record({"chosen": "say a word", "rejected": "say a thing"}, "f", 1))
    assert [(side.prompt, side.completion) for side in (pair.chosen, pair.rejected)] == [  # type: ignore[union-attr]
        ("say a", " word"),
        ("say a", " thing"),
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, 'has no key "rejected"'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, '"prompt" is empty'),
        ({"prompt": "", "chosen": [GOOD], "rejected": [BAD]}, '"prompt" is empty'),
        ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, '"prompt" is empty'),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, '"chosen" is empty'),
        ({"chosen": "b", "rejected": "c"}, "no common beginning"),
        ({"chosen": "b", "rejected": ["c"]}, "must both be texts"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, '"margin" is'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "finite"),
    ],
)
def test_a_record_that_is_no_pair_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as refused:
        PairReader().example(Record(fields, "pairs.jsonl", 3))
    assert str(refused.value).startswith("pairs.jsonl, line 3")


# -- runs --------------------------------------------------------------------------------------------


class Lines(Callback):
    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.valid: list[Mapping[str, Any]] = []

    def on_log(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.steps.append(dict(metrics))

    def on_evaluation(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.valid.append(dict(metrics))

    def losses(self) -> list[float]:
        return [float(line["loss"]) for line in self.steps]


def run(data: Path, directory: Path | None, *overrides: str) -> tuple[Lines, Trainer]:
    lines = Lines()
    trainer = Trainer(config(data, *overrides), run_dir=directory, callbacks=[lines])
    trainer.train()
    return lines, trainer


def test_the_first_step_is_ln_2_and_margins_grow(tmp_path: Path) -> None:
    lines, _ = run(write_pairs(tmp_path), tmp_path / "run", "train.train_iters=12", "lr_schedule.lr_warmup_iters=0")
    first, last = lines.steps[0], lines.steps[-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert last["loss"] < 0.6
    assert last["rewards/margins"] > 0.2
    assert last["rewards/accuracies"] > 0.8
    assert lines.valid[-1]["valid_loss"] < 0.65
    assert lines.valid[-1]["valid_rewards/accuracies"] > 0.5


def plain_loss(model: torch.nn.Module, reference: torch.nn.Module) -> Tensor:
    """DPO in plain torch: each answer by itself in a row of its own, without packing or masks."""
    losses = []
    for pair in PAIRS[:12]:
        ratios = []
        for side in ("chosen", "rejected"):
            # The byte tokenizer of the preset; its end of a document is 256.
            prompt, ids = pair["prompt"].encode(), [*(pair["prompt"] + pair[side]).encode(), 256]
            tokens = torch.tensor([ids[:-1]])
            labels = torch.tensor([ids[1:]])
            of_models = []
            for one in (model, reference):
                logps = F.log_softmax(one(tokens=tokens).float(), -1).gather(-1, labels[..., None])[0, :, 0]
                of_models.append(logps[len(prompt) - 1 :].sum())
            ratios.append(of_models[0] - of_models[1].detach())
        losses.append(-F.logsigmoid(0.1 * (ratios[0] - ratios[1])))
    return torch.stack(losses).mean()


@pytest.mark.slow
def test_gradients_are_those_of_plain_torch(tmp_path: Path) -> None:
    """All 12 pairs packed in one step, after the policy has left the reference: loss and every gradient in fp32."""
    data = write_pairs(tmp_path)
    _, trainer = run(data, tmp_path / "run", "train.train_iters=2")
    engine, whole = trainer.engine, trainer.train_data
    reference = Trainer(config(data))
    packs = {tuple(whole.members(index)): index for index in range(len(whole))}  # type: ignore[attr-defined]
    rows = [whole[index] for index in packs.values()]
    tensors = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    batch = trainer.source.complete(engine.rank_batch(tensors))
    # What the last step has left.
    trainer.model.zero_grad()
    found: dict[str, Tensor] = {}

    def keep() -> None:
        found.update({name: parameter.grad.clone() for name, parameter in engine.weights.named_parameters()})  # type: ignore[union-attr]

    engine.step.on_gradients = keep
    expected = plain_loss(trainer.model, reference.model)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}  # type: ignore[union-attr]
    trainer.model.zero_grad()
    outcome = engine.train_step(batch)
    assert outcome.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    # Pairs are what the loss is divided by, and tokens of answers, with their ends, what the speed counts.
    assert outcome.tokens == sum(len(pair[side].encode()) + 1 for pair in PAIRS[:12] for side in ("chosen", "rejected"))
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_second_model_as_reference_is_the_same(tmp_path: Path) -> None:
    data = write_pairs(tmp_path)
    Trainer(config(data, "train.train_iters=1", "train.loss=preference"), run_dir=tmp_path / "base").train()
    load = f"checkpoint.load={tmp_path / 'base'}"
    start, _ = run(data, tmp_path / "start", load)
    model, _ = run(data, tmp_path / "model", load, "preference.reference=model")
    assert model.losses() == pytest.approx(start.losses(), rel=1e-6)


def test_the_model_without_its_adapter_is_the_reference(tmp_path: Path) -> None:
    data = write_pairs(tmp_path)
    lora = ("adapter.type=lora", "adapter.rank=4", "train.train_iters=4", "lr_schedule.lr_warmup_iters=0")
    start, _ = run(data, tmp_path / "start", *lora)
    off, _ = run(data, tmp_path / "off", *lora, "preference.reference=adapter_off")
    assert off.losses()[0] == pytest.approx(math.log(2), abs=1e-6)
    assert off.losses()[-1] < 0.69
    assert off.losses() == pytest.approx(start.losses(), rel=1e-5)
    assert off.valid[-1]["valid_loss"] == pytest.approx(start.valid[-1]["valid_loss"], rel=1e-5)
    assert not (tmp_path / "off" / "reference.json").exists()


def test_an_adapter_that_is_trained_already_is_the_start_and_no_reference(tmp_path: Path) -> None:
    """By its PEFT folder, and by a checkpoint of a run, whose adapter is the policy's."""
    data = write_pairs(tmp_path)
    lora = ("adapter.type=lora", "adapter.rank=4", "lr_schedule.lr_warmup_iters=0", "optimizer.lr=0.1")
    run(data, tmp_path / "first", *lora)
    goes_on = (*lora, f"checkpoint.load={tmp_path / 'first'}", "preference.reference=adapter_off")
    with pytest.raises(TrainingError, match="the reference is another model"):
        run(data, tmp_path / "second", *goes_on)
    with pytest.raises(ConfigError, match="the run starts from the adapter"):
        config(data, "adapter.load=folder", "adapter.type=lora", "preference.reference=adapter_off")


def test_losses_that_sort_do_so_over_the_global_batch(tmp_path: Path) -> None:
    """Whatever the micro-batches; the reference moves away after the first step."""
    data = write_pairs(tmp_path)
    for name in ("aot", "aot_unpaired"):
        keys = (f"preference.loss=['{name}']", "lr_schedule.lr_warmup_iters=0")
        whole, _ = run(data, tmp_path / f"{name}-1", *keys, "train.micro_batch_size=4")
        cut, _ = run(data, tmp_path / f"{name}-2", *keys, "train.micro_batch_size=1")
        assert whole.losses()[0] == pytest.approx(math.log(2), abs=1e-6)
        assert whole.losses()[-1] < 0.69
        assert cut.losses() == pytest.approx(whole.losses(), rel=1e-5)


def test_a_template_that_drops_earlier_turns_is_refused(tmp_path: Path) -> None:
    turns = [USER, GOOD, {"role": "user", "content": "3+3?"}]
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": turns, "chosen": "6", "rejected": "7"}) + "\n")
    template = tmp_path / "last.jinja"
    template.write_text("{{ messages[-1]['content'] }}{% if add_generation_prompt %}>{% endif %}")
    with pytest.raises(DataError, match="line 1: .* writes the conversation up to message 4 differently"):
        Trainer(config(data, 'data.split="1,0,0"', f"data.chat_template_file={template}"))


def test_a_resumed_run_has_the_reference_of_its_start(tmp_path: Path) -> None:
    data = write_pairs(tmp_path)
    whole, _ = run(data, tmp_path / "whole")
    run(data, tmp_path / "cut", "train.exit_iteration=2")
    resumed, _ = run(data, tmp_path / "cut")
    assert resumed.losses() == whole.losses()[2:]
    run(data, tmp_path / "cut2", "train.exit_iteration=2")
    kept = json.loads((tmp_path / "cut2" / "reference.json").read_text())
    first = next(iter(kept))
    kept[first][0] += 1.0
    (tmp_path / "cut2" / "reference.json").write_text(json.dumps(kept))
    with pytest.raises(CheckpointError, match="other log-probabilities of the reference"):
        run(data, tmp_path / "cut2")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("preference.loss=['dpo']",), "losses are sigmoid"),
        (("preference.loss=['orpo']",), "has no reference"),
        (("train.batch_source=dataset",), "compares with a reference"),
        (("data.dataset_type=sft",), "takes pairs"),
        (("model.hidden_dropout=0.1",), "set it to 0"),
        (("preference.loss=['hinge']", "preference.label_smoothing=0.1"), "has no effect"),
        (("preference.loss=['sigmoid', 'sft']", "preference.loss_weights=[1.0]"), "give one for each"),
        (("preference.loss=['exo_pair']",), "above 0"),
        (("preference.reference=adapter_off",), "there is none; set adapter.type"),
        (
            ("preference.reference=adapter_off", "adapter.type=lora", "adapter.init=pissa"),
            "takes a part of the weights",
        ),
        (
            ("preference.reference=adapter_off", "adapter.type=lora", "adapter.modules_to_save=['embedding']"),
            "are trained in place",
        ),
    ],
)
def test_settings_that_contradict_are_refused(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(write_pairs(tmp_path), *overrides)


def test_a_pair_that_is_too_long_is_named_or_left_out(tmp_path: Path) -> None:
    data = write_pairs(tmp_path)
    with data.open("a") as file:
        file.write(json.dumps({"prompt": "x", "chosen": "y" * 40, "rejected": "z" * 40}) + "\n")
    whole = 'data.split="1,0,0"'
    with pytest.raises(DataError, match=r"line 17: both answers take 82 positions"):
        Trainer(config(data, whole))
    trainer = Trainer(config(data, whole, "data.on_too_long=drop"))
    members = {pair for index in range(len(trainer.train_data)) for pair in trainer.train_data.members(index)}  # type: ignore[attr-defined]
    assert members == set(range(16))


LAYOUTS = {
    "dp": (),
    "tp": ("parallel.tensor_model_parallel_size=2",),
    "pp": ("parallel.pipeline_model_parallel_size=2",),
    "cp": ("parallel.context_parallel_size=2",),
    "zero": ("parallel.use_distributed_optimizer=true",),
    "tp+sp": ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    "cp-a2a": ("parallel.context_parallel_size=2", "parallel.cp_comm_type=a2a"),
    "fsdp": ("parallel.use_torch_fsdp2=true",),
}
OF_FOUR = {
    "tp+sp+cp": (*LAYOUTS["tp+sp"], *LAYOUTS["cp"]),
    "tp+pp": (*LAYOUTS["tp"], *LAYOUTS["pp"]),
    "cp+pp": (*LAYOUTS["cp"], *LAYOUTS["pp"]),
    "tp+zero": (*LAYOUTS["tp"], *LAYOUTS["zero"]),
    "tp+fsdp": (*LAYOUTS["tp"], *LAYOUTS["fsdp"]),
}
"""On 4 ranks; each two features that meet here meet in tests of other losses, too."""


def train_in(rank: int, world: int, data: str, folder: str, layouts: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    found = {}
    for name, overrides in layouts.items():
        lines, _ = run(Path(data), Path(folder) / name, *overrides)
        margins = [line.get("rewards/margins") for line in lines.steps]
        found[name] = (lines.losses(), margins, lines.valid[-1]["valid_loss"])
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Losses, implicit rewards and validation over every kind of layout; about 12 s."""
    require_one_process(tmp_path, 2, LAYOUTS)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.exhaustive
def test_four_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """About 20 s."""
    require_one_process(tmp_path, 4, OF_FOUR)


def require_one_process(tmp_path: Path, world: int, layouts: dict[str, tuple[str, ...]]) -> None:
    data = write_pairs(tmp_path)
    alone, _ = run(data, tmp_path / "alone")
    expected = (alone.losses(), [line["rewards/margins"] for line in alone.steps], alone.valid[-1]["valid_loss"])
    for of_rank in run_ranks(world, train_in, str(data), str(tmp_path), layouts):
        for name, (losses, margins, valid) in of_rank.items():
            assert losses == pytest.approx(expected[0], rel=1e-5), name
            assert margins == pytest.approx(expected[1], abs=1e-4), name
            assert valid == pytest.approx(expected[2], rel=1e-5), name

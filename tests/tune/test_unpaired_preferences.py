"""Training on single answers that are desirable or not: KTO's formula and divergence, BCO's running mean, layouts, bad
records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tune.preference_runs import config
from torch import Tensor

from mt_core.errors import ConfigError, DataError
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_data.preprocess.readers import Record
from mt_tune.preferences.unpaired_records import UnpairedReader

ANSWERS = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b) if (a + b) % 3 else "no " * (1 + a), "label": (a + b) % 3 > 0}
    for a in range(4)
    for b in range(4)
]
BETA = 0.3
TRAINED = 12
"""Of ANSWERS, by data.split of the runs."""
KEYS = (
    "data.dataset_type=unpaired_preference",
    "train.loss=unpaired_preference",
    "train.batch_source=unpaired_reference",
    f"preference.beta={BETA}",
    "lr_schedule.lr_warmup_iters=0",
)


def write_answers(folder: Path) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(answer) + "\n" for answer in ANSWERS))
    return path


class Lines(Callback):
    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.valid: list[Mapping[str, Any]] = []

    def on_log(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.steps.append(dict(metrics))

    def on_evaluation(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.valid.append(dict(metrics))

    def values(self, name: str) -> list[float]:
        return [float(line[name]) for line in self.steps]


def run(data: Path, directory: Path | None, *overrides: str) -> tuple[Lines, Trainer]:
    lines = Lines()
    trainer = Trainer(config(data, *KEYS, *overrides), run_dir=directory, callbacks=[lines])
    trainer.train()
    return lines, trainer


# -- the formula, by plain torch -----------------------------------------------------------------------


def log_ratio(model: torch.nn.Module, reference: torch.nn.Module, prompt: str, completion: str) -> Tensor:
    """Each answer by itself in a row of its own, without packing or masks."""
    # The byte tokenizer of the preset; its end of a document is 256.
    ids = [*(prompt + completion).encode(), 256]
    tokens, labels = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
    sums = []
    for one in (model, reference):
        logps = F.log_softmax(one(tokens=tokens).float(), -1).gather(-1, labels[..., None])[0, :, 0]
        sums.append(logps[len(prompt.encode()) - 1 :].sum())
    return sums[0] - sums[1].detach()


def kto_by_hand(
    model: torch.nn.Module, reference: torch.nn.Module, weights: tuple[float, float]
) -> tuple[Tensor, float]:
    """(loss, z) of equation 7 of the paper over all answers of the split as one batch."""
    answers = ANSWERS[:TRAINED]
    ratios = [log_ratio(model, reference, a["prompt"], a["completion"]) for a in answers]  # type: ignore[arg-type]
    with torch.no_grad():
        mismatched = [
            log_ratio(model, reference, str(answers[i]["prompt"]), str(answers[i - 1]["completion"]))
            for i in range(TRAINED)
        ]
        z = max(float(torch.stack(mismatched).mean()), 0.0)
    desirable, undesirable = weights
    losses = [
        desirable * (1 - torch.sigmoid(BETA * (ratio - z)))
        if answer["label"]
        else undesirable * (1 - torch.sigmoid(BETA * (z - ratio)))
        for ratio, answer in zip(ratios, answers, strict=True)
    ]
    return torch.stack(losses).mean(), z


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_gradients_are_those_of_the_paper(tmp_path: Path, micro_batch_size: int) -> None:
    """About 3 s: loss, z and every gradient of a step over all answers, after the policy has left the reference; the
    micro-batches do not matter."""
    data = write_answers(tmp_path)
    weights = ("preference.desirable_weight=1.5", "preference.undesirable_weight=0.5")
    one_step = ("data.packing=false", f"train.global_batch_size={TRAINED}", "train.train_iters=4", *weights)
    size = f"train.micro_batch_size={micro_batch_size}"
    trainer = Trainer(config(data, *KEYS, *one_step, size, "optimizer.lr=0.02"), run_dir=tmp_path)
    reference = Trainer(config(data, *KEYS))
    gradients: list[dict[str, Tensor]] = []
    expected: list[tuple[float, float]] = []
    step = trainer.engine.step

    def keep() -> None:
        gradients.append({n: p.grad.clone() for n, p in trainer.engine.weights.named_parameters()})  # type: ignore[union-attr]

    step.on_gradients = keep
    batches = trainer.source.batches()
    for _ in range(3):
        batch = next(batches)
        trainer.model.zero_grad()
        loss, z = kto_by_hand(trainer.model, reference.model, (1.5, 0.5))
        loss.backward()
        wanted = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}  # type: ignore[union-attr]
        trainer.model.zero_grad()
        outcome = trainer.engine.train_step(batch)
        expected.append((float(loss.detach()), z))
        assert outcome.loss == pytest.approx(expected[-1][0], rel=1e-5)
        # Answers are what the loss is divided by, and their tokens what the speed counts.
        assert outcome.tokens == sum(int(arrays["token_mask"].sum()) for arrays in batch.micro_batches) > TRAINED
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[-1][name], gradient, rtol=1e-4, atol=1e-6)
        recorded = trainer.engine.loss.take_recorded()  # type: ignore[attr-defined]
        shown = [value for name, value, _ in recorded if name == "kl"]
        assert sum(shown) / len(shown) == pytest.approx(z, rel=1e-4, abs=1e-5)
    assert expected[-1][1] > 0.0, "the divergence has been something"
    batches.close()


def test_the_first_step_and_what_is_learnt(tmp_path: Path) -> None:
    lines, _ = run(write_answers(tmp_path), tmp_path / "run", "train.train_iters=15")
    assert lines.values("loss")[0] == pytest.approx(0.5, abs=1e-6)
    assert lines.values("kl")[0] == pytest.approx(0.0, abs=1e-5)
    assert lines.values("rewards/margins")[-1] > 0.5
    assert lines.values("rewards/chosen")[-1] > lines.values("rewards/rejected")[-1]
    assert lines.valid[-1]["valid_rewards/margins"] > 0.1


def test_the_mean_reward_of_bco_is_resumed(tmp_path: Path) -> None:
    """Loss ln 2 at first; later rewards are compared with the mean of all so far, which the checkpoint has."""
    data, bco = write_answers(tmp_path), ("preference.unpaired_loss=bco", "train.train_iters=6")
    whole, _ = run(data, tmp_path / "whole", *bco)
    assert whole.values("loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    rewards = [(float(line["rewards/chosen"]), float(line["rewards/rejected"])) for line in whole.steps]
    assert abs(whole.values("delta")[-1]) > 1e-3
    assert rewards[-1][0] > rewards[-1][1]
    run(data, tmp_path / "cut", *bco, "train.exit_iteration=3")
    resumed, _ = run(data, tmp_path / "cut", *bco)
    assert resumed.values("loss") == whole.values("loss")[3:]
    assert resumed.values("delta") == whole.values("delta")[3:]


# -- records -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "a", "completion": "b"}, 'has no key "label"'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "mt tune dpo"),
        ({"prompt": "a", "completion": "b", "label": 1}, '"label" is 1; it must be true'),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "\"label\" is 'yes'"),
        ({"prompt": "a", "completion": "b", "label": None}, '"label" is None'),
        ({"prompt": "", "completion": "b", "label": True}, '"prompt" is empty'),
        ({"prompt": [], "completion": "b", "label": True}, '"prompt" is empty'),
        ({"prompt": "a", "completion": "", "label": True}, '"completion" is empty'),
        ({"prompt": "a", "completion": ["b"], "label": True}, "must both be"),
    ],
)
def test_a_record_that_is_no_labelled_answer_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as refused:
        UnpairedReader().example(Record(fields, "answers.jsonl", 3))
    assert str(refused.value).startswith("answers.jsonl, line 3")


def test_answers_of_one_kind_alone_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_answers(tmp_path)
    path.write_text("".join(json.dumps({**answer, "label": True}) + "\n" for answer in ANSWERS))
    with caplog.at_level("WARNING"):
        Trainer(config(path, *KEYS))
    assert "answers are desirable; losses of single answers learn from both kinds" in caplog.text


def test_answers_to_other_prompts_fit_into_their_rows(tmp_path: Path) -> None:
    """Every record once; the second row has its prompt with the answer of the record before."""
    trainer = Trainer(config(write_answers(tmp_path), *KEYS))
    dataset: Any = trainer.train_data
    seen: dict[int, str] = {}
    for index in range(len(dataset)):
        sample = dataset[index]
        for segment, member in enumerate(dataset.members(index)):
            here = sample["other_prompt_segment_ids"] == segment
            tokens = sample["other_prompt_tokens"][here].tolist()
            labels = sample["other_prompt_labels"][here].tolist()
            seen[member] = bytes([*tokens[:1], *labels[:-1]]).decode()
            assert labels[-1] == 256
    assert seen == {i: f"{ANSWERS[i]['prompt']}{ANSWERS[(i - 1) % TRAINED]['completion']}" for i in range(TRAINED)}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("train.batch_source=reference",), 'set it to "unpaired_reference"'),
        (("data.dataset_type=preference",), "takes single answers"),
        (("model.hidden_dropout=0.1",), "set it to 0"),
    ],
)
def test_settings_that_contradict_are_refused(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(write_answers(tmp_path), *KEYS, *overrides)


# -- layouts -----------------------------------------------------------------------------------------

LAYOUTS = {
    "dp": (),
    "tp": ("parallel.tensor_model_parallel_size=2",),
    "pp": ("parallel.pipeline_model_parallel_size=2",),
    "cp": ("parallel.context_parallel_size=2",),
    "zero": ("parallel.use_distributed_optimizer=true",),
    "fsdp": ("parallel.use_torch_fsdp2=true",),
}


def compared(lines: Lines) -> list[list[float]]:
    of_steps = [lines.values(key) for key in ("loss", "kl", "rewards/margins")]
    return [*of_steps, [line["valid_loss"] for line in lines.valid]]


def train_in(rank: int, world: int, data: str, folder: str, layouts: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    found = {}
    for name, overrides in layouts.items():
        lines, _ = run(Path(data), Path(folder) / name, *overrides)
        found[name] = compared(lines)
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """About 8 s: losses, divergence, margins and validation over every kind of layout."""
    data = write_answers(tmp_path)
    alone, _ = run(data, tmp_path / "alone")
    expected = compared(alone)
    for of_rank in run_ranks(2, train_in, str(data), str(tmp_path), LAYOUTS):
        for name, found in of_rank.items():
            for ours, wanted in zip(found, expected, strict=True):
                assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-5), name

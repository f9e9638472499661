"""The real TRL computes the losses, gradients and metrics of preferences that we compute from the same models and
pairs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.peer.environment import python_beside_this

from mt_core.nn.loss import build_cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_tune.preferences.config import PreferenceConfig
from mt_tune.preferences.objective import PreferenceLoss
from mt_tune.preferences.packed_rows import packed_row as packed_answers
from mt_tune.preferences.samples import ANSWER, BASELINE, CLASS_SHARE, DESIRABLE, MARGIN, MATCHED, REFERENCE_LOGPS
from mt_tune.preferences.segments import segment_sums
from mt_tune.preferences.unpaired_objective import UnpairedLossOfBatch
from mt_tune.reward_models.losses import RewardLoss
from mt_tune.reward_models.rows import last_scored, row_of_texts
from mt_tune.reward_models.samples import SCORED

PROCESS = Path(__file__).parent / "trl_process"
VOCABULARY, BETA = 48, 0.3
PAIRS = [
    ([3, 7, 9], [5, 6, 11, 1], [8, 1]),
    ([4, 4], [10, 12, 1], [13, 14, 15, 16, 1]),
    ([20, 21, 22, 23], [9, 1], [30, 1]),
]
SMOOTHED = 0.1
LOSSES = [
    *((name, 0.0) for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")),
    *((name, 0.0) for name in ("discopop", "sigmoid_norm")),
    *((name, SMOOTHED) for name in ("robust", "exo_pair", "aot", "aot_unpaired")),
]
METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)


def save_model(folder: Path, seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def run_trl(script: str, job: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """What a script of trl_process computes for models that it saves in the folder as policy and reference."""
    for name, seed in (("policy", 1), ("reference", 2)):
        save_model(folder / name, seed)
    folders = {"policy": str(folder / "policy"), "reference": str(folder / "reference")}
    job = {**folders, "vocabulary": VOCABULARY, "beta": BETA, "out": str(folder / "found.safetensors"), **job}
    (folder / "job.json").write_text(json.dumps(job))
    python = python_beside_this("trl>=1.16,<1.17", "accelerate", "datasets")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [str(python), str(PROCESS / script), str(folder / "job.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "found.safetensors")


def models_in(folder: Path) -> list[torch.nn.Module]:
    return [
        transformers.AutoModelForCausalLM.from_pretrained(folder / which, attn_implementation="eager")
        for which in ("policy", "reference")
    ]


def require_equal_gradients(policy: torch.nn.Module, found: dict[str, torch.Tensor], number: int) -> None:
    for parameter, value in policy.named_parameters():
        expected = found[f"{number}.grad.{parameter}"]
        # Rounding of fp32 sums is relative to their largest terms, which losses of unbounded size make large.
        torch.testing.assert_close(value.grad, expected, rtol=1e-4, atol=1e-6 * max(float(expected.abs().max()), 1.0))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("trl")
    return folder, run_trl("compute.py", {"pairs": PAIRS, "losses": LOSSES}, folder)


def packed_row() -> dict[str, torch.Tensor]:
    """All pairs in one row, as the data set packs them: [1, S] each."""
    tokens: list[int] = []
    labels: list[int] = []
    answers: list[int] = []
    segments: list[int] = []
    anchors: list[int] = []
    for pair, (prompt, *sides) in enumerate(PAIRS):
        for side, answer in enumerate(sides):
            whole = [*prompt, *answer]
            anchor = len(tokens) + len(prompt) - 1
            tokens += whole[:-1]
            labels += whole[1:]
            answers += [int(place >= len(prompt)) for place in range(1, len(whole))]
            segments += [2 * pair + side] * (len(whole) - 1)
            if side == 0:
                anchors.append(anchor)
    mask = torch.zeros(1, len(tokens))
    mask[0, anchors] = 1.0
    row = {"tokens": torch.tensor([tokens]), "labels": torch.tensor([labels]), "segment_ids": torch.tensor([segments])}
    return {**row, ANSWER: torch.tensor([answers]).float(), "loss_mask": mask}


def logits_of(model: torch.nn.Module, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each answer by itself, put together as the row has them."""
    counts = torch.bincount(row["segment_ids"][0]).tolist()
    parts = [model(input_ids=part[None]).logits for part in row["tokens"][0].split(counts)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("number", range(len(LOSSES)), ids=[name for name, _ in LOSSES])
def test_trl_computes_the_same(judged: tuple[Path, dict[str, torch.Tensor]], number: int) -> None:
    folder, found = judged
    name, smoothing = LOSSES[number]
    policy, reference = models_in(folder)
    keys = PreferenceConfig(loss=[name], beta=BETA, label_smoothing=smoothing)
    parallel, row = ParallelContext(), packed_row()
    token_loss = build_cross_entropy(None, None)  # type: ignore[arg-type]
    with torch.no_grad():
        sums = segment_sums(-token_loss(logits_of(reference, row), row) * row[ANSWER], row, parallel.cp)
    ratios = segment_sums(-token_loss(logits_of(policy, row), row) * row[ANSWER], row, parallel.cp).detach() - sums
    fields = {REFERENCE_LOGPS: placed(sums[0], row), **matched(ratios[0], sums[0], row)}
    loss = PreferenceLoss(keys, token_loss, parallel)
    losses = loss(logits_of(policy, row), {**row, **fields})
    mean = (losses * row["loss_mask"]).sum() / len(PAIRS)
    mean.backward()
    torch.testing.assert_close(mean.detach(), found[f"{number}.loss"], rtol=1e-5, atol=1e-6)
    require_equal_gradients(policy, found, number)
    recorded = loss.take_recorded()
    for metric in METRICS:
        ours = [value for key, value, _ in recorded if key == metric]
        theirs = float(found[f"{number}.metric.{metric}"])
        assert sum(ours) / len(ours) == pytest.approx(theirs, rel=1e-4, abs=1e-5), metric


def placed(values: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """[1, S]: the value of each answer at its first predicted position."""
    field = torch.zeros_like(row[ANSWER])
    for answer in range(int(row["segment_ids"].max()) + 1):
        here = (row["segment_ids"][0] == answer) & (row[ANSWER][0] > 0)
        field[0, int(here.nonzero()[0])] = values[answer]
    return field


def matched(ratios: torch.Tensor, sums: torch.Tensor, row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fields of losses that sort: for each answer what stands at its place in the other order."""
    count = 2 * len(PAIRS)
    chosen, rejected = ratios[0:count:2], ratios[1:count:2]
    reference = sums[0:count:2] - sums[1:count:2]
    policy = chosen - rejected + reference

    def at_equal_places(own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return torch.stack([others.sort().values[int((own < value).sum())] for value in own])

    of_margins = at_equal_places(policy, reference)
    of_sides = (at_equal_places(chosen, rejected), at_equal_places(rejected, chosen))
    return {
        MATCHED["aot"]: placed(torch.stack([of_margins, of_margins], 1).flatten(), row),
        MATCHED["aot_unpaired"]: placed(torch.stack(of_sides, 1).flatten(), row),
    }


# -- single answers ----------------------------------------------------------------------------------

ANSWERS = [
    ([3, 7, 9], [5, 6, 11, 1], True),
    ([4, 4], [10, 12, 1], False),
    ([20, 21, 22, 23], [9, 1], True),
    ([8], [30, 31, 1], False),
    ([14, 2, 5], [7, 1], False),
]
UNPAIRED = [("kto", 1.0, 1.0), ("kto", 1.3, 0.6), ("apo_zero_unpaired", 1.0, 0.5)]
UNPAIRED_METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


@pytest.fixture(scope="module")
def judged_answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("kto")
    return folder, run_trl("unpaired.py", {"answers": ANSWERS, "losses": UNPAIRED}, folder)


def log_ratio(policy: Any, reference: Any, prompt: list[int], answer: list[int]) -> float:
    ids = torch.tensor([[*prompt, *answer]])
    sums = []
    for model in (policy, reference):
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        sums.append(float(logps[len(prompt) - 1 :].sum()))
    return sums[0] - sums[1]


@pytest.mark.parametrize("number", range(len(UNPAIRED)), ids=[f"{name}-{w}" for name, w, _ in UNPAIRED])
def test_trl_computes_the_same_of_single_answers(
    judged_answers: tuple[Path, dict[str, torch.Tensor]], number: int
) -> None:
    folder, found = judged_answers
    name, desirable, undesirable = UNPAIRED[number]
    policy, reference = models_in(folder)
    encoded = [
        (np.array([*prompt, *answer], np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt))
        for prompt, answer, _ in ANSWERS
    ]
    arrays, firsts = packed_answers(encoded, sum(len(tokens) - 1 for tokens, _ in encoded))
    row = {key: torch.from_numpy(array)[None] for key, array in arrays.items()}
    row["loss_mask"] = torch.zeros(row["tokens"].shape)
    row["loss_mask"][0, firsts] = 1.0
    signs = torch.tensor([1.0 if label else -1.0 for *_, label in ANSWERS])
    parallel, token_loss = ParallelContext(), build_cross_entropy(None, None)  # type: ignore[arg-type]
    with torch.no_grad():
        sums = segment_sums(-token_loss(logits_of(reference, row), row) * row[ANSWER], row, parallel.cp)
        others = [log_ratio(policy, reference, ANSWERS[i][0], ANSWERS[i - 1][1]) for i in range(len(ANSWERS))]
    kl = max(sum(others) / len(others), 0.0) if name == "kto" else 0.0
    shares = [len(ANSWERS) / int(signs.eq(sign).sum()) * sign for sign in signs.tolist()]
    fields = {
        REFERENCE_LOGPS: placed(sums[0], row),
        DESIRABLE: placed(signs, row),
        CLASS_SHARE: placed(torch.tensor(shares), row),
        BASELINE: torch.full(row["tokens"].shape, BETA * kl),
    }
    keys = PreferenceConfig(unpaired_loss=name, beta=BETA, desirable_weight=desirable, undesirable_weight=undesirable)
    loss = UnpairedLossOfBatch(keys, token_loss, parallel)
    mean = (loss(logits_of(policy, row), {**row, **fields}) * row["loss_mask"]).sum() / len(ANSWERS)
    mean.backward()
    torch.testing.assert_close(mean.detach(), found[f"{number}.loss"], rtol=1e-5, atol=1e-6)
    require_equal_gradients(policy, found, number)
    assert kl == pytest.approx(float(found[f"{number}.metric.kl"]), rel=1e-4, abs=1e-6)
    recorded = loss.take_recorded()
    for metric in UNPAIRED_METRICS:
        ours = [value for key, value, _ in recorded if key == metric]
        assert sum(ours) / len(ours) == pytest.approx(float(found[f"{number}.metric.{metric}"]), rel=1e-4), metric


# -- reward models -----------------------------------------------------------------------------------

REWARDS = [(None, None), (0.1, None), (0.01, [0.5, 0.0, 1.5])]
REWARD_METRICS = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")


@pytest.fixture(scope="module")
def judged_rewards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("reward")
    save_model(folder / "base", 3)
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder / "base", num_labels=1, pad_token_id=2)
    model.save_pretrained(folder / "model")
    return folder, run_trl("reward.py", {"model": str(folder / "model"), "pairs": PAIRS, "cases": REWARDS}, folder)


@pytest.mark.parametrize("number", range(len(REWARDS)))
def test_trl_computes_the_same_of_reward_models(
    judged_rewards: tuple[Path, dict[str, torch.Tensor]], number: int
) -> None:
    """Each text by itself through the model, in the rows that the data set makes."""
    folder, found = judged_rewards
    centring, margins = REWARDS[number]
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder / "model", attn_implementation="eager")
    texts = [np.array([*prompt, *answer], np.int32) for prompt, *answers in PAIRS for answer in answers]
    arrays, starts = row_of_texts(texts, sum(map(len, texts)))
    row = {key: torch.from_numpy(array)[None] for key, array in arrays.items()}
    scored = [start + last_scored(text, 2) for start, text in zip(starts, texts, strict=True)]
    row |= {SCORED: torch.zeros(row["tokens"].shape), MARGIN: torch.zeros(row["tokens"].shape)}
    row[SCORED][0, scored] = 1.0
    row["loss_mask"][0, scored[0::2]] = 1.0
    row[MARGIN][0, scored[0::2]] = torch.tensor(margins or [0.0] * len(PAIRS))
    states = torch.cat([model.model(input_ids=torch.tensor(text)[None].long()).last_hidden_state for text in texts], 1)
    loss = RewardLoss(centring or 0.0, ParallelContext())
    mean = (loss(model.score(states), row) * row["loss_mask"]).sum() / len(PAIRS)
    mean.backward()
    torch.testing.assert_close(mean.detach(), found[f"{number}.loss"], rtol=1e-5, atol=1e-6)
    require_equal_gradients(model, found, number)
    taken = loss.take_recorded()
    reduced = {"mean": lambda values: sum(values) / len(values), "min": min, "max": max}
    for metric in REWARD_METRICS:
        ours = [(value, reduction) for key, value, reduction in taken if key == metric]
        value = reduced[ours[0][1]]([value for value, _ in ours])
        assert value == pytest.approx(float(found[f"{number}.metric.{metric}"]), rel=1e-4), metric

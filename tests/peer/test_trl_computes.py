"""The real TRL computes the losses, gradients and metrics of preferences that we compute from the same models and
pairs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.peer.environment import python_beside_this

from mt_core.nn.loss import build_cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_tune.preferences.config import PreferenceConfig
from mt_tune.preferences.objective import REFERENCE_LOGPS, PreferenceLoss, segment_sums
from mt_tune.preferences.samples import ANSWER

COMPUTE = Path(__file__).parent / "trl_process" / "compute.py"
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
    *((name, SMOOTHED) for name in ("robust", "exo_pair")),
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


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("trl")
    for name, seed in (("policy", 1), ("reference", 2)):
        save_model(folder / name, seed)
    job = {
        "policy": str(folder / "policy"),
        "reference": str(folder / "reference"),
        "pairs": PAIRS,
        "losses": LOSSES,
        "beta": BETA,
        "vocabulary": VOCABULARY,
        "out": str(folder / "found.safetensors"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    python = python_beside_this("trl>=1.16,<1.17", "accelerate", "datasets")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [str(python), str(COMPUTE), str(folder / "job.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, load_file(folder / "found.safetensors")


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
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / which, attn_implementation="eager")
        for which in ("policy", "reference")
    )
    keys = PreferenceConfig(loss=[name], beta=BETA, label_smoothing=smoothing)
    parallel, row = ParallelContext(), packed_row()
    token_loss = build_cross_entropy(None, None)  # type: ignore[arg-type]
    with torch.no_grad():
        sums = segment_sums(-token_loss(logits_of(reference, row), row) * row[ANSWER], row, parallel.cp)
    predicted = [(row["segment_ids"][0] == answer) & (row[ANSWER][0] > 0) for answer in range(2 * len(PAIRS))]
    firsts = [int(places.nonzero()[0]) for places in predicted]
    values = torch.zeros_like(row[ANSWER])
    values[0, firsts] = sums[0, : 2 * len(PAIRS)]
    loss = PreferenceLoss(keys, token_loss, parallel)
    losses = loss(logits_of(policy, row), {**row, REFERENCE_LOGPS: values})
    mean = (losses * row["loss_mask"]).sum() / len(PAIRS)
    mean.backward()
    torch.testing.assert_close(mean.detach(), found[f"{number}.loss"], rtol=1e-5, atol=1e-6)
    for parameter, value in policy.named_parameters():
        expected = found[f"{number}.grad.{parameter}"]
        # Rounding of fp32 sums is relative to their largest terms, which losses of unbounded size make large.
        torch.testing.assert_close(value.grad, expected, rtol=1e-4, atol=1e-6 * max(float(expected.abs().max()), 1.0))
    recorded = loss.take_recorded()
    for metric in METRICS:
        ours = [value for key, value, _ in recorded if key == metric]
        theirs = float(found[f"{number}.metric.{metric}"])
        assert sum(ours) / len(ours) == pytest.approx(theirs, rel=1e-4, abs=1e-5), metric

"""Development sets are evaluated alike in every layout: each sample once, whatever divides their number."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.rule_tasks import mnli_settings

from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import Trainer
from mt_eval.classification.evaluation import evaluate_sets
from mt_eval.classification.model import TrainedClassifier

pytestmark = pytest.mark.dist

FULL_BATCH = ["train.micro_batch_size=4", "train.global_batch_size=8"]


def evaluated(rank: int, world: int, settings: list[str]) -> dict[str, float]:
    """Scores after one step of training, of sets with 50 and 31 samples."""
    overrides = [*settings, *FULL_BATCH, "train.exit_iteration=1"]
    trainer = Trainer(load_config(preset="mnli-bert-tiny", overrides=overrides))
    trainer.train()
    found = {name: trainer.engine.predict(dataset) for name, dataset in trainer.valid_data.items()}
    assert {name: sorted(one.fields["uid"].tolist()) for name, one in found.items()} == {
        "matched": list(range(50)),
        "mismatched": list(range(31)),
    }
    return trainer.evaluate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, []),
        (2, ["parallel.tensor_model_parallel_size=2"]),
        (2, ["parallel.use_torch_fsdp2=true"]),  # ranks meet in all-gathers, so that both need as many micro-batches
    ],
)
def test_evaluation_of_a_training_run(tmp_path, ranks, layout) -> None:
    settings = mnli_settings(tmp_path)
    reference = evaluated(0, 1, settings)
    for found in run_ranks(ranks, evaluated, [*settings, *layout]):
        assert found == pytest.approx(reference, abs=1e-5)


def scores(rank: int, world: int, folder: Path, layout: dict) -> dict[str, dict]:
    settings = {"parallel": layout} if world > 1 else {}
    classifier = TrainedClassifier(folder / "run", load_plugins(), device="cpu", settings=settings)
    sets = {name: str(folder / f"{name}.tsv") for name in ("matched", "mismatched")}
    results = evaluate_sets(classifier, sets, predictions=folder / f"predictions-{world}").tasks
    return {name: {**result.metrics, "samples": result.samples} for name, result in results.items()}


@pytest.mark.slow
def test_evaluation_of_a_checkpoint(tmp_path) -> None:
    """TP 2 x DP 2: predictions are those of one process, sample by sample."""
    overrides = [*mnli_settings(tmp_path), "train.exit_iteration=4", "train.micro_batch_size=4"]
    Trainer(load_config(preset="mnli-bert-tiny", overrides=overrides), run_dir=tmp_path / "run").train()
    reference = scores(0, 1, tmp_path, {})
    assert reference["overall"]["samples"] == 81
    for found in run_ranks(4, scores, tmp_path, {"tensor_model_parallel_size": 2}):
        assert found == {name: pytest.approx(values, abs=1e-5) for name, values in reference.items()}

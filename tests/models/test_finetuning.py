"""Finetuning on tasks whose rule a small model learns: the presets, development sets, best epoch, starting points."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tests.models.rule_tasks import SMALL, mnli_settings, write_race, write_vocabulary

from mt_cli import main
from mt_core.checkpoint_lookup import find_checkpoint
from mt_core.config.loading import load_config
from mt_core.errors import MtError
from mt_core.train import Trainer
from mt_core.train.trained_model import load_trained_model
from mt_eval.classification.evaluation import evaluate_sets
from mt_eval.classification.model import TrainedClassifier

GOLDEN = os.environ.get("MT_GOLDEN")
CHANCE = 0.6


def trainer_of(host, preset: str, settings: list[str], run_dir: Path | None = None, **keys) -> Trainer:
    return Trainer(load_config(preset=preset, overrides=settings, host=host), run_dir=run_dir, host=host, **keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mnli")


@pytest.fixture(scope="module")
def mnli(folder) -> list[str]:
    return mnli_settings(folder)


@pytest.fixture(scope="module")
def finetuned(host, mnli, folder) -> Trainer:
    trainer = trainer_of(host, "mnli-bert-tiny", mnli, folder / "run")
    assert trainer.evaluate()["overall_accuracy"] < CHANCE
    trainer.train()
    return trainer


@pytest.mark.slow
def test_both_development_sets_are_learned_and_every_sample_counts_once(finetuned, folder, host) -> None:
    """The reported accuracies are those of the saved model, one line of the file after another."""
    trained = load_trained_model(finetuned.directory.path, host)
    right = {}
    for name, dataset in finetuned.valid_data.items():
        lines = (folder / f"{name}.tsv").read_text().splitlines()[1:]
        assert len(dataset) == len(lines)
        right[name] = 0
        for number in range(len(dataset)):
            sample = {key: torch.from_numpy(value)[None] for key, value in dataset[number].items()}
            with torch.no_grad():
                logits = trained.model(**{key: sample[key] for key in trained.model.inputs})
            label = ["contradiction", "entailment", "neutral"][int(logits.argmax())]
            right[name] += lines[int(sample["uid"])].endswith(f"\t{label}")
    reported = finetuned.last_evaluation
    assert reported["matched_accuracy"] == pytest.approx(right["matched"] / 50)
    assert reported["mismatched_accuracy"] == pytest.approx(right["mismatched"] / 31)
    assert reported["overall_accuracy"] == pytest.approx(sum(right.values()) / 81)
    assert min(reported["matched_accuracy"], reported["mismatched_accuracy"]) > 0.95


def test_each_epoch_is_evaluated_and_saved(finetuned) -> None:
    lines = map(json.loads, (finetuned.directory.path / "metrics.jsonl").read_text().splitlines())
    assert [line["iteration"] for line in lines if line["kind"] == "valid"] == [15, 30, 45, 60, 75]
    assert "matched accuracy 1.0000" in (finetuned.directory.path / "log.txt").read_text()


def scripted(trainer: Trainer, values: list[float], name: str = "overall_accuracy") -> Trainer:
    """A run whose evaluations give these values."""
    left = iter(values)
    trainer.validation.evaluate = lambda: {name: next(left)}  # type: ignore[method-assign]
    return trainer


BRIEF = ["train.train_epochs=4", "train.global_batch_size=80", "optimizer.lr=0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "name", "values", "best"),
    [
        ("accuracy", "overall_accuracy", [float("nan"), 0.9, 0.9, 0.7], 6),
        ("matched_loss", "matched_loss", [0.5, 0.3, 0.2, 0.4], 9),
    ],
)
def test_the_best_epoch_is_kept_beside_the_last(host, mnli, tmp_path, metric, name, values, best) -> None:
    settings = [*mnli, *BRIEF, f"checkpoint.best_metric={metric}"]
    scripted(trainer_of(host, "mnli-bert-tiny", settings, tmp_path), values, name).train()
    assert main.run(["ckpt", "prune", str(tmp_path), "--keep-last", "1"]) == 0
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert kept == [f"iter_{best:07d}", "iter_0000012"]
    assert find_checkpoint(tmp_path / "best").name == f"iter_{best:07d}"
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["value"] == values[best // 3 - 1]


@pytest.mark.slow
def test_a_resumed_run_compares_with_what_came_before(host, mnli, tmp_path) -> None:
    settings = [*mnli, *BRIEF]
    first = [*settings, "train.exit_iteration=6"]
    scripted(trainer_of(host, "mnli-bert-tiny", first, tmp_path), [0.8, 0.6]).train()
    scripted(trainer_of(host, "mnli-bert-tiny", settings, tmp_path), [0.7, 0.75]).train()
    assert find_checkpoint(tmp_path / "best").name == "iter_0000003"


@pytest.mark.slow
def test_race(host, tmp_path) -> None:
    """Folders without weights are one training set, as many epochs as are asked for."""
    folders = [write_race(tmp_path / name, count, seed) for seed, (name, count) in enumerate((("a", 70), ("b", 60)))]
    dev = write_race(tmp_path / "dev", 35, 9)
    settings = [
        *SMALL,
        f"tokenizer.vocab_file={write_vocabulary(tmp_path)}",
        f"data.train_data_path={json.dumps([str(folder) for folder in folders])}",
        f'data.valid_data_path=["{dev}"]',
        "train.train_epochs=6",
    ]
    trainer = trainer_of(host, "race-bert-tiny", settings, tmp_path / "run")
    assert trainer.config.train.train_iters == 6 * (130 // 16)
    assert trainer.evaluate()["valid_accuracy"] < CHANCE
    learned = trainer.train().metrics["valid_accuracy"]
    assert learned > 0.95
    classifier = TrainedClassifier(tmp_path / "run", host)
    assert evaluate_sets(classifier, {"dev": str(dev)}).tasks["dev"].metrics["accuracy"] == learned


@pytest.mark.slow
@pytest.mark.skipif(GOLDEN is None, reason="MT_GOLDEN names no folder of golden files")
def test_a_bert_that_megatron_wrote_learns_the_task(host, mnli) -> None:
    """Its shape replaces the preset's, its pooler is read, and only the head is new."""
    load = f"checkpoint.load={GOLDEN}/ckpt/bert/dist_tp1_pp1"
    others = [setting for setting in mnli if not setting.startswith("model.")]
    trainer = trainer_of(host, "mnli-bert-tiny", [*others, load, "optimizer.lr=1e-3"])
    assert trainer.config.model.layernorm_placement == "pre"
    assert trainer.loaded_weights.initialized == ["classification_head.weight", "classification_head.bias"]
    left_out = {name.partition(".")[0] for name in trainer.loaded_weights.left_out}
    assert left_out == {"binary_head", "lm_head", "output_layer"}
    assert trainer.train().metrics["overall_accuracy"] > 0.95


def test_a_bert_of_hugging_face_gives_its_weights_and_shape(host, mnli, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    reference = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=30, **shape))
    reference.save_pretrained(tmp_path / "hf")
    others = [setting for setting in mnli if not setting.startswith("model.")]
    trainer = trainer_of(host, "mnli-bert-345m", [*others, f"checkpoint.load={tmp_path / 'hf'}"])
    assert (trainer.config.model.hidden_size, trainer.config.model.num_classes) == (24, 3)
    assert torch.equal(trainer.model.pooler.dense.weight, reference.bert.pooler.dense.weight)
    assert trainer.loaded_weights.initialized == ["classification_head.weight", "classification_head.bias"]


@pytest.mark.slow
def test_a_decoder_with_a_head_learns_the_task(host, mnli, tmp_path) -> None:
    """From a GPT's checkpoint; texts end with EOD, and the state there is read."""
    tiny = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "train.train_iters=1"]
    pretrain = [*tiny, "train.eval_iters=0", "data.corpus_bytes=1000000", "data.seq_length=32", "logging.progress=none"]
    trainer_of(host, "gpt-tiny", pretrain, tmp_path / "gpt").train()
    settings = [
        *(setting for setting in mnli if not setting.startswith(("model.", "tokenizer."))),
        "model.family=gpt_classification",
        "model.num_classes=3",
        f"checkpoint.load={tmp_path / 'gpt'}",
        "data.dataset_type=mnli",
        "data.sequence_format=eod",
        "data.seq_length=48",
        "train.full_validation=true",
        "train.eval_interval=null",
        "train.loss=classification",
        "lr_schedule.lr_decay_style=constant",
        "train.train_epochs=8",
    ]
    trainer = Trainer(load_config(overrides=settings, host=host), host=host)
    assert trainer.loaded_weights.initialized == ["classification_head.weight"]
    assert trainer.train().metrics["overall_accuracy"] > 0.95


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (['train.eval_metrics=["f2"]'], r'eval_metrics has "f2", and train\.loss=classification has accuracy, f1, .*'),
        (
            ["checkpoint.best_metric=valid_accuracy"],
            r'best_metric="valid_accuracy": evaluations have matched_loss, mis',
        ),
        (["data.valid_data_paths=null"], r'best_metric="accuracy": there is no validation set'),
        (["data.seq_length=32"], r"seq_length=32 is longer than model\.max_position_embeddings=16"),
        (["model.num_classes=2"], r"num_classes=2 does not fit data.dataset_type=mnli, which has 3 classes"),
        (["data.dataset_type=stsb"], r"num_classes=3 does not fit .*stsb, which has a number to predict; set it to 1"),
        (["data.dataset_type=stsb", "model.num_classes=1"], r'with model\.num_classes=1 and train\.loss="regression"'),
        (["data.dataset_type=qqp", "model.num_classes=2"], r"there is no column id"),
    ],
)
def test_what_cannot_be_finetuned_is_refused(host, mnli, settings, words) -> None:
    with pytest.raises(MtError, match=words):
        trainer_of(host, "mnli-bert-tiny", [*mnli, *settings])

"""Hugging Face folders that training writes: transformers computes the loss that training reported."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.dist.in_turn import one_after_another

from mt_ckpt.convert import export
from mt_core.config.loading import load_config
from mt_core.data.building import build_datasets, build_tokenizer
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import Trainer
from mt_core.train.build import with_vocab_size

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "data.num_workers=0",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.train_iters=4",
    "train.eval_interval=2",
    "train.eval_iters=2",
    "train.sample_prompt=null",
    "train.num_threads=1",
    "checkpoint.save_interval=1",
    "checkpoint.save_hf_interval=2",
    "optimizer.lr=0.01",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
]
LLAMA = [
    "model.family=llama",
    "model.num_query_groups=1",
    "model.ffn_hidden_size=24",
    "model.max_position_embeddings=16",
]
MIXTRAL = ["model.family=mixtral", "model.moe={num_experts=4}", *LLAMA[1:]]
LAYOUTS: dict[str, list[str]] = {
    "tensor": [*LLAMA, "parallel.tensor_model_parallel_size=2"],
    "pipeline": [*LLAMA, "parallel.pipeline_model_parallel_size=2"],
    "fsdp2": [*LLAMA, "parallel.use_torch_fsdp2=true"],
    "experts": [*MIXTRAL, "parallel.expert_model_parallel_size=2", "parallel.use_distributed_optimizer=true"],
}


def train(rank: int, world: int, case: tuple[Path, str]) -> None:
    run_dir, layout = case
    overrides = [*SMALL, *LAYOUTS[layout], "checkpoint.async_save=true"]
    Trainer(load_config(overrides=overrides), run_dir=run_dir).train()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a training under each layout, one after another in the same ranks."""
    folders = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    run_ranks(2, one_after_another, train, [(folder, layout) for layout, folder in folders.items()])
    return folders


def transformers_loss(folder: Path, overrides: list[str]) -> float:
    """Mean over the tokens of the validation batches that training evaluated."""
    from transformers import AutoModelForCausalLM  # which the ranks of this module need not import

    host = load_plugins()
    config = load_config(overrides=[*SMALL, *overrides], host=host).config
    tokenizer = build_tokenizer(config, host)
    data = build_datasets(with_vocab_size(config, tokenizer), tokenizer, "valid", host)["valid"]
    samples = [data[index] for index in range(8)]
    tokens, labels = (torch.stack([torch.as_tensor(s[key]) for s in samples]).long() for key in ("tokens", "labels"))
    mask = torch.stack([torch.as_tensor(s["loss_mask"]) for s in samples])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        losses = F.cross_entropy(model(tokens).logits.transpose(1, 2), labels, reduction="none")
    return float((losses * mask).sum() / mask.sum())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_computes_the_loss_of_the_evaluation(runs: dict[str, Path], layout: str) -> None:
    lines = [json.loads(line) for line in (runs[layout] / "metrics.jsonl").read_text().splitlines()]
    valid_losses = {line["iteration"]: line["valid_loss"] for line in lines if line["kind"] == "valid"}
    folder = runs[layout] / "checkpoints" / "hf"
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000002", "iter_0000004"]
    alone = [key for key in LAYOUTS[layout] if not key.startswith("parallel.")]
    for iteration, loss in valid_losses.items():
        assert transformers_loss(folder / f"iter_{iteration:07d}", alone) == pytest.approx(loss, rel=2e-6)


class HeldConversion:
    """Converts when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.export = export.export

    def __call__(self, *arguments: Any) -> Any:
        assert self.go.wait(60)
        return self.export(*arguments)


def run_alone(run_dir: Path, *overrides: str) -> Trainer:
    trainer = Trainer(load_config(overrides=[*SMALL, *LLAMA, *overrides]), run_dir=run_dir)
    trainer.train()
    return trainer


@pytest.mark.slow
def test_training_does_not_wait_and_the_source_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps and their checkpoints are done before the first conversion; keep_last leaves what it reads."""
    held, seen = HeldConversion(), []
    monkeypatch.setattr(export, "export", held)
    finish = export.HuggingFaceExport.on_train_end

    def let_go(self: export.HuggingFaceExport, run: Any, result: Any) -> None:
        seen.extend(sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")))
        held.go.set()
        finish(self, run, result)

    monkeypatch.setattr(export.HuggingFaceExport, "on_train_end", let_go)
    run_alone(tmp_path, "train.train_iters=5", "checkpoint.keep_last=1")
    assert seen == ["iter_0000002", "iter_0000004", "iter_0000005"]
    written = sorted(path.name for path in (tmp_path / "checkpoints" / "hf").iterdir())
    assert written == ["iter_0000002", "iter_0000004", "iter_0000005"]  # the last step's, too
    assert transformers_loss(tmp_path / "checkpoints" / "hf" / "iter_0000005", LLAMA) > 0


def test_a_failed_conversion_is_reported_with_the_command_that_repeats_it(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("no space left")

    monkeypatch.setattr(export, "export", fail)
    assert run_alone(tmp_path).state.iteration == 4
    text = (tmp_path / "log.txt").read_text()
    assert "iter_0000002 was not written for Hugging Face: no space left; try again: mt convert --load-dir" in text


def test_a_resumed_run_makes_up_for_what_the_stopped_one_did_not_convert(tmp_path: Path) -> None:
    run_alone(tmp_path, "train.exit_iteration=2", "checkpoint.save_hf_interval=null")
    assert not (tmp_path / "checkpoints" / "hf").exists()
    run_alone(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "hf").iterdir()) == ["iter_0000002", "iter_0000004"]


def test_what_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    retro = ["model.family=retro", "model.retro_chunk_length=8", "data.dataset_type=builtin_retro"]
    for overrides, words in (
        ([*retro, "data.retro_chunk_length=8"], "model.family=retro has no names in Hugging Face's format"),
        (
            [*LLAMA, "checkpoint.save_interval=3", "checkpoint.save_hf_interval=4"],
            "no multiple of .*save_interval=3.* use 3",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(overrides=[*SMALL, *overrides])

"""BERT, T5 and the biencoder as a user trains them: the documented commands, the recipes; and against plain loops."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.docs.blocks import ROOT, blocks, commands
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.train import Callback, Trainer
from mt_models.bert.hugging_face import HUGGING_FACE as BERT
from mt_models.hugging_face import HuggingFaceFamily, to_reference
from mt_models.t5.hugging_face import HUGGING_FACE as T5

pytestmark = pytest.mark.slow

QUICK = [
    "train.eval_iters=1",
    "train.num_threads=1",
    "lr_schedule.lr_warmup_iters=3",
    "lr_schedule.lr_decay_style=constant",
    "logging.log_interval=1",
]
SMALL = ["model.hidden_size=64", "data.seq_length=64"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder in which the first commands of both pages have been run."""
    from mt_cli import main

    folder = tmp_path_factory.mktemp("topics")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with chdir(folder):
        for page in ("docs/models/bert.md", "docs/models/biencoder.md"):
            first = next(block for block in blocks() if block.page == page and block.language == "sh")
            for command in commands(first):
                if command.is_mt:
                    assert main.run(command.words) == 0, command.text
                else:
                    subprocess.run(["bash", "-euc", command.text], env=environment, check=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "first", "fall", "steps", "options"),
    [
        ("bert", math.log(2000) + math.log(2), 0.7, 30, [*SMALL, "train.micro_batch_size=8", "optimizer.lr=3e-3"]),
        ("t5", math.log(2000), 0.7, 30, [*SMALL, "train.micro_batch_size=8", "optimizer.lr=3e-3"]),
        ("ict", math.log(16), 0.2, 60, ["train.micro_batch_size=16", "optimizer.lr=1e-3"]),
    ],
)
def test_the_recipe_trains(
    workplace, monkeypatch, recipe: str, first: float, fall: float, steps: int, options: list[str]
) -> None:
    """From the loss of guessing it falls, through `mt train`."""
    from mt_cli import main

    monkeypatch.chdir(workplace)
    settings = [*QUICK, "model.num_layers=1", f"train.train_iters={steps}", *options]
    arguments = [part for setting in settings for part in ("--set", setting)]
    code = main.run(["train", str(ROOT / f"examples/{recipe}.toml"), *arguments, "--run-dir", f"run-{recipe}"])
    assert code == 0
    lines = [json.loads(line) for line in Path(f"run-{recipe}/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == steps
    assert losses[0] == pytest.approx(first, abs=0.2)
    assert sum(losses[-8:]) / 8 < first - fall
    assert [line for line in lines if line["kind"] == "valid"]


# -- step by step beside a plain loop ------------------------------------------------------------------


def bert_loss(reference: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = reference(batch["tokens"], attention_mask=batch["padding_mask"], token_type_ids=batch["tokentype_ids"])
    words = F.cross_entropy(out.prediction_logits.transpose(1, 2), batch["labels"], ignore_index=-1)
    order = F.cross_entropy(out.seq_relationship_logits, batch["is_random"], reduction="none")
    share = batch["loss_mask"].sum(1) / batch["loss_mask"].sum()
    return words + (order * share).sum()


def t5_loss(reference: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = reference(
        batch["encoder_tokens"], attention_mask=batch["encoder_mask"], decoder_input_ids=batch["decoder_tokens"]
    ).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-1)


def plain_loop(reference: nn.Module, loss_of: Callable, trainer: Trainer, steps: int, size: int) -> list[float]:
    """AdamW, decay of matrices alone, clipping of the global norm; the trainer's samples and learning rates."""
    parameters = list(reference.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    losses = []
    for step in range(steps):
        rows = [trainer.train_data[step * size + row] for row in range(size)]
        batch = {name: torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in rows[0]}
        loss = loss_of(reference, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = trainer.engine.schedule(step * size)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("recipe", "family", "name", "loss_of", "options"),
    [
        ("bert", BERT, "BertForPreTraining", bert_loss, ["model.layernorm_placement=post"]),
        ("bert", BERT, "MegatronBertForPreTraining", bert_loss, []),
        ("t5", T5, "T5ForConditionalGeneration", t5_loss, ["model.untie_embeddings_and_output_weights=false"]),
    ],
)
def test_twenty_steps_equal_those_of_a_plain_loop(
    workplace,
    monkeypatch,
    host,
    recipe: str,
    family: HuggingFaceFamily,
    name: str,
    loss_of: Callable,
    options: list[str],
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(workplace)
    settings = [
        "train.micro_batch_size=2",
        "train.global_batch_size=4",
        "train.train_iters=20",
        "train.eval_interval=null",
        "train.num_threads=1",
        "checkpoint.save_interval=null",
        "logging.progress=none",
        "optimizer.weight_decay=0.1",
        "optimizer.adam_beta2=0.95",
        "lr_schedule.lr_warmup_iters=4",
        "model.num_layers=2",
        *SMALL,
    ]
    losses = []

    class Steps(Callback):
        def on_step_end(self, run, metrics) -> None:
            losses.append(metrics["loss"])

    config = load_config(ROOT / f"examples/{recipe}.toml", overrides=[*settings, *options], host=host)
    trainer = Trainer(config, host=host, valid_data={}, callbacks=[Steps()])
    kind = getattr(transformers, name)
    external = family.write_config(trainer.config.model)
    reference = kind(kind.config_class(**{key: external[key] for key in external if key != "model_type"})).eval()
    missing, unexpected = reference.load_state_dict(to_reference(trainer.model, family), strict=False)
    assert not unexpected
    assert set(missing) <= set(family.copies(trainer.config.model))
    expected = plain_loop(reference, loss_of, trainer, 20, 4)
    trainer.train()
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0] - 0.5

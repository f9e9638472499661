"""Runs that go wrong by what their configuration says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from scripts.wrong_runs.cases import case, good, mt, train

COMPARE = ["compare", "good"]


@case(
    "learning-rate",
    plot=["good", "lr"],
    command=[*COMPARE, "lr"],
    words=["they part at step 2 in learning_rate", "optimizer.lr is 0.003 in A and 0.3 in B"],
)
def learning_rate(folder: Path) -> None:
    good(folder)
    train(folder, "lr", {"optimizer.lr": 0.3})


@case(
    "data-order",
    plot=["good", "order"],
    command=[*COMPARE, "order", "--samples", "4"],
    words=["samples: sample 0 is", "train.seed is 1234 in A and 7 in B"],
)
def data_order(folder: Path) -> None:
    good(folder)
    train(folder, "order", {"train.seed": 7})


@case(
    "loss-scale",
    plot=["half", "--metric", "loss_scale", "--log-y"],
    command=[*COMPARE, "half"],
    words=["they part at step 1 in skipped_iterations", "precision.dtype is fp32 in A and fp16 in B"],
)
def loss_scale(folder: Path) -> None:
    good(folder)
    train(folder, "half", {"precision.dtype": "fp16"})


# -- a bad shard -------------------------------------------------------------------------------------

SHARDS = 4


@case(
    "bad-shard",
    plot=["shards", "bad-shard", "--smooth", "10"],
    command=["compare", "shards", "bad-shard", "--samples", "400"],
    words=["part-2_text_document", "data.data_path"],
)
def bad_shard(folder: Path) -> None:
    """Of four files of tokens the third has been written over, with ids that the vocabulary has."""
    texts = _texts(folder)
    for place in range(SHARDS):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[place::SHARDS])
        (folder / f"part-{place}.jsonl").write_text(lines, encoding="utf-8")
        _preprocess(folder, f"part-{place}")
    (folder / "copy").mkdir(exist_ok=True)
    for place in range(SHARDS):
        for ending in ("bin", "idx"):
            name = f"part-{place}_text_document.{ending}"
            (folder / "copy" / name).write_bytes((folder / name).read_bytes())
    tokens = np.memmap(folder / "copy/part-2_text_document.bin", np.uint16, "r+")
    tokens[:] = np.random.default_rng(0).integers(0, 256, len(tokens))
    tokens.flush()
    for name, prefix in (("shards", "."), ("bad-shard", "copy")):
        paths = [f'{{prefix = "{prefix}/part-{place}_text_document", weight = 1}}' for place in range(SHARDS)]
        train(folder, name, {"data.dataset_type": "gpt", "data.data_path": f"[{', '.join(paths)}]"})


def _texts(folder: Path) -> list[str]:
    """Modules of Python's library."""
    import tokenize

    sources = sorted(Path(tokenize.__file__).parent.glob("*.py"))[:80]
    return [source.read_text(encoding="utf-8", errors="ignore") for source in sources]


def _preprocess(folder: Path, name: str) -> None:
    if not (folder / f"{name}_text_document.bin").exists():
        words = ["--input", f"{name}.jsonl", "--output-prefix", name, "--tokenizer-type", "ByteLevelTokenizer"]
        mt(folder, "data", "preprocess", *words, "--append-eod", "--workers", "1")


# -- experts and tokenizers --------------------------------------------------------------------------

MIXTRAL = str(Path(__file__).parents[2] / "examples/mixtral-tiny.toml")
MIXTURE = {
    "model.moe.num_experts": 8,
    "model.moe.moe_router_topk": 1,
    "model.moe.moe_router_pre_softmax": "true",
    "model.moe.moe_ffn_hidden_size": 32,
}


@case(
    "router-collapse",
    plot=["balanced", "collapsed", "--metric", "moe/layer_1/load_max_over_mean"],
    command=["watch", "collapsed", "--once"],
    words=["experts without a token: ", "layer 1"],
)
def router_collapse(folder: Path) -> None:
    """Without a loss of balance, a large learning rate leaves a few experts."""
    model = {**MIXTURE, "model.num_query_groups": 2, "model.norm_epsilon": 1e-5}
    balance = "model.moe.moe_router_load_balancing_type"
    coefficient = "model.moe.moe_aux_loss_coeff"
    train(folder, "balanced", {**model, balance: '["aux_loss"]', coefficient: "[0.02]"}, MIXTRAL)
    train(folder, "collapsed", {**model, balance: '["none"]', coefficient: "null", "optimizer.lr": 0.03}, MIXTRAL)


@case(
    "wrong-tokenizer",
    plot=["continued", "other-tokenizer"],
    command=["compare", "continued", "other-tokenizer"],
    words=["they part at step 1 in loss", "tokenizer."],
)
def wrong_tokenizer(folder: Path) -> None:
    """Training goes on from a checkpoint, once with its tokenizer and once with another one of the same size."""
    size = ("--kind", "bpe", "--vocab-size", "400", "--format", "huggingface")
    for name, part in (("first", slice(0, 40)), ("second", slice(40, 80))):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in _texts(folder)[part])
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        if not (folder / name).exists():
            mt(folder, "data", "train-tokenizer", "--input", f"{name}.jsonl", *size, "--output", name)
    keys = {"tokenizer.tokenizer_type": "HuggingFaceTokenizer", "tokenizer.tokenizer_model": "first"}
    train(folder, "pretrained", {**keys, "optimizer.lr": 0.01})
    more = {**keys, "checkpoint.load": "pretrained", "train.train_iters": 100}
    train(folder, "continued", more)
    train(folder, "other-tokenizer", {**more, "tokenizer.tokenizer_model": "second"})

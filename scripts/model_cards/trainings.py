"""Small trainings of each family, whose layouts are compared: decoders on the built-in corpus, and the examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from scripts.model_cards.training import Training
from tests.ckpt.convert_cases import MODELS
from tests.dist.test_family_layouts import FAMILIES, SETTINGS, settings
from tests.docs.blocks import ROOT, blocks, commands
from tests.infer.test_families import GPT_OSS

DECODERS = {**MODELS, **{name: keys for name, keys in FAMILIES.items() if name in MODELS}, "gpt_oss": GPT_OSS}
SHORT = tuple(setting for setting in SETTINGS if not setting.startswith("data."))
WORDS = ("bert", "modernbert", "t5", "bart", "biencoder")
"""Families that train on files of sentences."""
EXAMPLES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        name: (name, ())
        for name in (
            *("vision", "llava", "smolvlm", "internvl", "qwen_vl", "qwen3_vl", "qwen_next_vl", "gemma4_vl"),
            *("mistral3", "kimi_k25", "minimax_m3_vl", "qwen3_omni", "retro", "bert", "t5"),
        )
    },
    "modernbert": ("bert", ("data.bert_binary_head=false", "model.local_attention=32")),
    "bart": ("t5", ("model.activation=gelu", "model.max_position_embeddings=128")),
    "biencoder": ("ict", ()),
}
"""Family -> a file in examples/, and what it changes there."""
DROPPED = {
    "modernbert": ("max_position_embeddings", "hidden_dropout"),
    "bart": ("untie_embeddings_and_output_weights",),
    "retro": ("adam_beta2",),
}
"""Keys of the example that its family or plain SGD does not have."""


def trainings(family: str) -> Iterator[tuple[str, Training]]:
    if family in EXAMPLES:
        example, changes = EXAMPLES[family]
        words = words_folder() if family in WORDS else None
        experts = "experts" in (ROOT / "examples" / f"{example}.toml").read_text(encoding="utf-8")
        overrides = (*SHORT, f"model.family={family}", *changes)
        yield family, Training(example, overrides, experts, family != "smolvlm", DROPPED.get(family, ()), words)
        return
    for name, keys in DECODERS.items():
        if keys["family"] == family:
            yield name, Training(None, (*SETTINGS, *settings("model", decoder(keys))), "moe" in keys)


def decoder(keys: dict[str, Any]) -> dict[str, Any]:
    keys = {**keys, "vocab_size": 263}
    if "moe" in keys:
        # An even number, which two ranks divide.
        keys["moe"] = {**keys["moe"], "num_experts": 2 * keys["moe"]["num_experts"]}
    return keys


@cache
def words_folder() -> Path:
    """Where the first commands of the pages of BERT and the biencoder have been run."""
    import subprocess

    from mt_cli import main

    folder = Path(mkdtemp(prefix="mt-cards-"))
    with chdir(folder):
        for page in ("docs/models/bert.md", "docs/models/biencoder.md"):
            first = next(block for block in blocks() if block.page == page and block.language == "sh")
            for command in commands(first):
                if command.is_mt:
                    main.run(command.words)
                else:
                    subprocess.run(["bash", "-euc", command.text], check=True)
    return folder

"""Small trainings of each family, whose layouts are compared.

Decoders on the built-in corpus, the examples, and heads on files of a task.
"""

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
from tests.models.rule_tasks import write_mnli, write_race, write_vocabulary

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
    # The loss contrasts the texts of one micro-batch with one another and with those of other data-parallel ranks.
    "biencoder": ("ict", ("train.micro_batch_size=4", "train.global_batch_size=8")),
}
"""Family -> a file in examples/, and what it changes there."""
HEADS = (
    "bert_classification",
    "bert_multiple_choice",
    "modernbert_classification",
    "gpt_classification",
    "llama_classification",
)
"""Families that train on files of a task."""
HEAD_SETTINGS = (
    *(f"model.{key}={value}" for key, value in (("num_layers", 2), ("hidden_size", 32), ("num_attention_heads", 2))),
    "train.loss=classification",
    # A class is chosen by few numbers, of which a small model makes nearly equal ones.
    "model.init_method_std=0.1",
)
FURTHER = {
    "mistral3": {
        "mistral3 of mistral4": (
            *(
                f"model.language_model.{key}"
                for key in ("family=mistral4", "moe.num_experts=8", "moe.moe_router_topk=2")
            ),
            'model.language_model.moe.moe_layer_freq="([0]*1+[1]*1)"',
        )
    }
}
"""Family -> a further training of its example, and what that changes there."""
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
        yield (
            family,
            Training(
                example, overrides, experts, family not in ("smolvlm", "biencoder"), DROPPED.get(family, ()), words
            ),
        )
        for name, further in FURTHER.get(family, {}).items():
            yield name, Training(example, (*overrides, *further), experts=True, whole_sequences=True)
        return
    if family in HEADS:
        overrides = (*SHORT, *HEAD_SETTINGS, f"model.family={family}", *task_settings(family))
        yield family, Training(None, overrides, whole_sequences=True)
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


def task_settings(family: str) -> list[str]:
    """What a head reads: texts between marks for encoders, texts that end with EOD for decoders."""
    folder = Path(mkdtemp(prefix="mt-cards-"))
    if family.endswith("multiple_choice"):
        task = ["data.dataset_type=race", f'data.train_data_path=["{write_race(folder / "race", 16, 0)}"]']
    else:
        path = write_mnli(folder / "train.tsv", 64, 0)
        task = ["data.dataset_type=mnli", "model.num_classes=3", f'data.train_data_path=["{path}"]']
    if family.startswith(("gpt", "llama")):
        return [*task, "data.sequence_format=eod", "data.seq_length=48", "model.max_position_embeddings=48"]
    words = ["tokenizer.tokenizer_type=BertWordPieceLowerCase", f"tokenizer.vocab_file={write_vocabulary(folder)}"]
    shape = ["data.seq_length=16", "model.max_position_embeddings=16"]
    if family.startswith("bert"):
        # Attention drops other weights where its heads are divided.
        shape += ["model.hidden_dropout=0.0", "model.attention_dropout=0.0"]
    return [*task, *words, *shape]


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

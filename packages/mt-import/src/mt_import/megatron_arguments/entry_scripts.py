"""Megatron's training scripts, and what each adds to the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from mt_core.errors import ConfigError, did_you_mean

GPT_TOKENIZER = "GPT2BPETokenizer"
BERT_TOKENIZER = "BertWordPieceLowerCase"


@dataclass(frozen=True)
class EntryScript:
    """A kind of model that Megatron has a script for.

    scripts: file names, with a folder where other programs have a script of that name. presets: arguments that it sets
    where they were not given. dataset_type: ours. parameters: canonical names that show what its model consists of,
    where no argument does. fixed_sections: those that its arguments do not decide, since the script has them in its
    code; fixed: which, and what to write for them. fixed_groups: of the arguments that belong to them, beside those of
    their keys.
    """

    name: str
    scripts: tuple[str, ...]
    presets: Mapping[str, Any] = field(default_factory=dict)
    dataset_type: str = "gpt"
    parameters: tuple[str, ...] = ()
    fixed_sections: tuple[str, ...] = ()
    fixed: str = ""
    fixed_groups: tuple[str, ...] = ()


_BERT_PARAMETERS = ("encoder.layers.0.mlp.linear_fc1.weight", "embedding.tokentype_embeddings.weight")
ENTRY_SCRIPTS = (
    EntryScript("gpt", ("pretrain_gpt.py", "pretrain_gpt_core.py"), {"tokenizer_type": GPT_TOKENIZER}),
    EntryScript(
        "bert",
        ("pretrain_bert.py", "pretrain_bert_core.py"),
        {"tokenizer_type": BERT_TOKENIZER},
        dataset_type="bert",
        parameters=(*_BERT_PARAMETERS, "lm_head.dense.weight"),
    ),
    EntryScript(
        "t5",
        ("pretrain_t5.py", "pretrain_t5_core.py"),
        {"tokenizer_type": BERT_TOKENIZER},
        dataset_type="t5",
        parameters=("encoder.layers.0", "decoder.layers.0", "output_layer.bias"),
    ),
    EntryScript(
        "hybrid",
        ("pretrain_mamba.py", "pretrain_hybrid.py"),
        {"tokenizer_type": GPT_TOKENIZER, "is_hybrid_model": True},
    ),
    EntryScript("retro", ("pretrain_retro.py",), {"tokenizer_type": GPT_TOKENIZER}, dataset_type="retro"),
    EntryScript(
        "ict",
        ("pretrain_ict.py",),
        {"tokenizer_type": BERT_TOKENIZER},
        dataset_type="ict",
        parameters=_BERT_PARAMETERS,
    ),
    EntryScript(
        "vlm",
        ("pretrain_vlm.py", "multimodal/train.py"),
        {"tokenizer_type": GPT_TOKENIZER},
        dataset_type="image_text",
    ),
    EntryScript(
        "rl",
        ("train_rl.py",),
        {"tokenizer_type": GPT_TOKENIZER},
        fixed_sections=("data",),
        fixed="reinforcement learning, its environments and rollouts; mt train trains on texts: write data.data_path",
        fixed_groups=("rl",),
    ),
    EntryScript(
        "vision",
        ("pretrain_vision_classify.py", "pretrain_vision_dino.py", "pretrain_vision_inpaint.py"),
        fixed_sections=("model", "tokenizer", "data"),
        fixed="the script has the model's head, its image folders and augmentations in its code; write "
        "model.family=vision with data.dataset_type=image_folder, see docs/models/vision.md",
        fixed_groups=("vision",),
    ),
)


ABSENT: Mapping[str, str] = {
    "mimo/train.py": "tower, projection, decoder and data are Python functions of the script, which its "
    "--model-provider and --dataset-provider name; write model.family=llava with the sizes of both, see "
    "docs/models/llava.md",
}
"""Megatron's scripts whose arguments do not say what is trained -> why."""


def absent_entry(path: str) -> str | None:
    """Why the arguments of this script do not say what it trains; None for another script."""
    return next((why for script, why in ABSENT.items() if _ends_with(path, script)), None)


def entry_script(name: str) -> EntryScript:
    """By its name here (gpt, bert, ...). Raises ConfigError."""
    known = {entry.name: entry for entry in ENTRY_SCRIPTS}
    if name not in known:
        raise ConfigError(f"--entry {name}: it can be {', '.join(known)}{did_you_mean(name, known)}")
    return known[name]


def entry_of_file(path: str) -> EntryScript | None:
    """Entry of the script that a launcher starts; None for one that is not Megatron's."""
    return next((entry for entry in ENTRY_SCRIPTS if any(_ends_with(path, script) for script in entry.scripts)), None)


def _ends_with(path: str, script: str) -> bool:
    # By whole parts of the path: multimodal/train.py, and not every train.py.
    wanted = PurePosixPath(script).parts
    return PurePosixPath(path).parts[-len(wanted) :] == wanted

"""Reads GPT-2 from the layout, whatever its tensor and pipeline parallel sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.hugging_face.reader import same_bits
from mt_ckpt.megatron.folder import is_of_reshaping_tool
from mt_ckpt.pickles.inert_objects import Inert
from mt_ckpt.pickles.torch_file import StoredTensor, open_torch_file
from mt_core.checkpoint_lookup import MODEL
from mt_core.errors import CheckpointError, ConfigError, did_you_mean
from mt_core.plugins import PluginHost

# -- names, and shards of tensor-parallel ranks ------------------------------------------------------

EMBEDDING = ("model", "language_model", "embedding")
ENCODER = ("model", "language_model", "encoder")
OLD_ENCODER = ("model", "language_model", "transformer")
"""What Megatron called it before."""
HEAD = ("model", "word_embeddings_for_head")
"""A copy of the word embeddings, on the last stage."""
WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"

IN_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
OLD_ATTENTION = "attention."
"""What the tool's older files have for `self_attention.`"""
CUT_ALONG = {
    "self_attention.query_key_value.weight": 0,
    "self_attention.query_key_value.bias": 0,
    "self_attention.dense.weight": 1,
    "mlp.dense_h_to_4h.weight": 0,
    "mlp.dense_h_to_4h.bias": 0,
    "mlp.dense_4h_to_h.weight": 1,
}
"""Name within a layer -> the dimension that ranks share; the others are whole on every rank."""
FINAL_NORM = "final_layernorm"

_OURS = re.compile(r"decoder\.layers\.([0-9]+)\.(.+)\.(weight|bias)")
_THEIRS = re.compile(r"layers\.([0-9]+)\.(.+)\.(weight|bias)")


def layer_of(ours: str) -> tuple[int, str] | None:
    """(number, name within a layer there) of a canonical name; None for one outside the layers."""
    match = _OURS.fullmatch(ours)
    return (int(match[1]), f"{IN_LAYER[match[2]]}.{match[3]}") if match and match[2] in IN_LAYER else None


def canonical(theirs: str, first_layer: int) -> str | None:
    """The canonical name of an entry of the encoder; None for one that is unknown. first_layer: of the stage."""
    if theirs in (f"{FINAL_NORM}.weight", f"{FINAL_NORM}.bias"):
        return f"decoder.{theirs}"
    match = _THEIRS.fullmatch(theirs)
    if match is None:
        return None
    inside = match[2].replace(OLD_ATTENTION, "self_attention.", 1) if match[2].startswith(OLD_ATTENTION) else match[2]
    module = next((ours for ours, there in IN_LAYER.items() if there == inside), None)
    return module and f"decoder.layers.{first_layer + int(match[1])}.{module}.{match[3]}"


def cut_along(theirs: str) -> int | None:
    """The dimension along which an entry of the encoder is cut, None for whole ones."""
    match = _THEIRS.fullmatch(theirs)
    inside = f"{match[2]}.{match[3]}" if match else ""
    if inside.startswith(OLD_ATTENTION):
        inside = "self_" + inside
    return CUT_ALONG.get(inside)


TRACKER = "latest_checkpointed_iteration.txt"
RANK = re.compile(r"mp_rank_([0-9]{2})(?:_([0-9]{3}))?")
FILES = ("model_optim_rng.pt", "model_rng.pt")


def detect(path: Path) -> bool:
    """Whether `path` holds the tool's files: Megatron's names from before Megatron-Core, and the tool's own argument.

    Files of its older versions have no such argument; those have to be requested (--loader).
    """
    return is_of_reshaping_tool(path)


def open_checkpoint(path: Path, host: PluginHost | None = None) -> TransformersMegatronReader:
    """Open the folder that the tool wrote, or the `release` folder in it. Raises CheckpointError and ConfigError."""
    stages = _read_ranks(_release(path))
    arguments = stages[0][0].get("args")
    if not isinstance(arguments, Inert):
        raise CheckpointError(f"{path}: the files have no args, from which the model's configuration is read")
    return TransformersMegatronReader(stages, arguments.attributes)


@dataclass(frozen=True)
class _Cut:
    """What the tensor-parallel ranks hold of a tensor. rows: the true number of rows, if there is padding."""

    parts: tuple[StoredTensor, ...]
    dim: int | None
    rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self.parts[0].shape)
        if self.dim is not None:
            sizes[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        # `rows` of the whole vocabulary, without the rows of padding at the end.
        return (self.rows or sizes[0], *sizes[1:])

    def read(self, name: str) -> Tensor:
        if self.dim is not None:
            return torch.cat([part.read() for part in self.parts], self.dim)[: self.shape[0]]
        first, *others = (part.read() for part in self.parts)
        if not all(same_bits(first, other) for other in others):
            raise CheckpointError(f"{name}: the ranks' copies of this tensor differ")
        return first


class TransformersMegatronReader:
    """Canonical tensors (a `CheckpointReader`)."""

    def __init__(self, stages: Sequence[Sequence[Mapping[str, Any]]], arguments: Mapping[str, Any]) -> None:
        """stages: for each pipeline stage, what each tensor-parallel rank stored."""
        model = _model_section(arguments)
        tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": model["vocab_size"]}
        self.metadata: Mapping[str, Any] = {"iteration": 0, "config": {"model": model, "tokenizer": tokenizer}}
        self._version = float(stages[0][0].get("checkpoint_version") or 0.0)
        self._heads = int(model["num_attention_heads"])
        self._tensors = _collect(stages, model)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: cut.shape for name, cut in self._tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: cut.parts[0].dtype for name, cut in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        cut = self._tensors.get(name)
        if cut is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}{did_you_mean(name, self._tensors)}")
        tensor = cut.read(name)
        return by_head(tensor, self._heads, self._version) if ".linear_qkv." in name else tensor

    def files(self) -> Mapping[str, bytes]:
        return {}


def by_head(rows: Tensor, heads: int, version: float) -> Tensor:
    """Rows of queries, keys and values as head, kind, channel, from the order of a checkpoint's version.

    0: kind, head, channel. 1: head, channel, kind. 2 and later: as they are.
    """
    if version >= 2.0:
        return rows
    # [heads, D, 3] -> [heads, 3, D]
    if version >= 1.0:
        return rows.unflatten(0, (heads, -1, 3)).movedim(2, 1).flatten(0, 2).contiguous()
    # [3, heads, D] -> [heads, 3, D]
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def _collect(stages: Sequence[Sequence[Mapping[str, Any]]], model: Mapping[str, Any]) -> dict[str, _Cut]:
    # The tool divides layers evenly, and numbers them from 0 on each stage.
    per_stage = model["num_layers"] // len(stages)
    cuts: dict[str, _Cut] = {}
    for number, ranks in enumerate(stages):
        key = ENCODER if _inside(ranks[0], ENCODER) else OLD_ENCODER
        for theirs in _inside(ranks[0], key):
            ours = canonical(theirs, number * per_stage)
            if ours is None:
                raise CheckpointError(f"{'.'.join(key)} has {theirs}, which GPT-2 does not have")
            cuts[MODEL + ours] = _Cut(_parts(ranks, key, theirs), cut_along(theirs))
    first, last = stages[0], stages[-1]
    words = _Cut(_parts(first, (*EMBEDDING, "word_embeddings"), "weight"), 0, model["vocab_size"])
    _require_same_head(words, last)
    cuts[MODEL + WORDS] = words
    cuts[MODEL + POSITIONS] = _Cut(_parts(first, (*EMBEDDING, "position_embeddings"), "weight"), None)
    return cuts


def _require_same_head(words: _Cut, last: Sequence[Mapping[str, Any]]) -> None:
    """The last stage's copy of the word embeddings, where there is one, is a copy."""
    if not _inside(last[0], HEAD):
        return
    head = _Cut(_parts(last, HEAD, "weight"), 0, words.rows)
    if not same_bits(words.read(WORDS).contiguous(), head.read("word_embeddings_for_head").contiguous()):
        raise CheckpointError("word_embeddings_for_head differs from the word embeddings, to which GPT-2 ties it")


def _parts(ranks: Sequence[Mapping[str, Any]], key: tuple[str, ...], name: str) -> tuple[StoredTensor, ...]:
    parts = tuple(_inside(rank, key).get(name) for rank in ranks)
    if not all(isinstance(part, StoredTensor) for part in parts):
        raise CheckpointError(f"{'.'.join(key)}.{name} is missing in the checkpoint, on one rank at least")
    return parts  # type: ignore[return-value]


def _inside(content: Mapping[str, Any], key: tuple[str, ...]) -> Mapping[str, Any]:
    """The dictionary at the end of a path, {} if there is none."""
    for part in key:
        entry = content.get(part)
        content = entry if isinstance(entry, Mapping) else {}
    return content


# -- configuration ----------------------------------------------------------------------------------


def _model_section(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """[model] from the arguments: as the tool itself, dropouts are GPT-2's 0.1."""

    def need(key: str) -> Any:
        if arguments.get(key) is None:
            raise ConfigError(f"the checkpoint's args have no {key}, which the model's configuration needs")
        return arguments[key]

    # Megatron's fused bias and GELU is the tanh form too.
    tanh = bool(arguments.get("openai_gelu") or arguments.get("bias_gelu_fusion"))
    return {
        "family": "gpt",
        "vocab_size": arguments.get("orig_vocab_size") or need("padded_vocab_size"),
        "num_layers": need("num_layers"),
        "hidden_size": need("hidden_size"),
        "num_attention_heads": need("num_attention_heads"),
        "ffn_hidden_size": need("ffn_hidden_size"),
        "max_position_embeddings": need("max_position_embeddings"),
        "activation": "gelu_tanh" if tanh else "gelu",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    }


# -- files ------------------------------------------------------------------------------------------


def _release(path: Path) -> Path:
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    name = tracker.read_text(encoding="utf-8", errors="replace").strip()
    folder = path / (f"iter_{int(name):07d}" if name.isdecimal() else name)
    if Path(name).name != name or not folder.is_dir():
        raise CheckpointError(f"{tracker}: names {name!r}, which is not there")
    return folder


def _read_ranks(folder: Path) -> list[list[Mapping[str, Any]]]:
    """For each pipeline stage, the contents of each tensor-parallel rank's file."""
    places: dict[tuple[int, int], Path] = {}
    for entry in folder.glob("mp_rank_*"):
        if match := RANK.fullmatch(entry.name):
            places[int(match[2] or 0), int(match[1])] = entry
    # The arguments are in the files; the folders say how many there are before one is opened.
    stages, ranks = (1 + max((place[i] for place in places), default=-1) for i in range(2))
    if not places or len(places) != stages * ranks:
        raise CheckpointError(f"{folder}: has {len(places)} folders mp_rank_TT[_PPP], expected one for each rank")
    return [[_read_rank(places[stage, rank]) for rank in range(ranks)] for stage in range(stages)]


def _read_rank(folder: Path) -> Mapping[str, Any]:
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder}: has none of {', '.join(FILES)}")
    content = open_torch_file(file).value
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, expected a dictionary")
    return content

"""Writes TensorRT-LLM checkpoints: config.json and a safetensors file for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import PENDING_BYTES, SafetensorsWriter, TensorInfo, align
from mt_ckpt.model import model_config
from mt_ckpt.trtllm.config import GATED, require_expressible, write_config
from mt_ckpt.writing.options import NOT_MEGATRON, refuse, refuse_megatron
from mt_ckpt.writing.resumable import ResumableFolder, work_key
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.plugins import PluginHost

# -- shards of each tensor over the ranks of a stage -------------------------------------------------

Parts = dict[str, list[Tensor]]
"""Name in the files -> what each tensor-parallel rank has of it."""

TOP = {
    "embedding.word_embeddings.weight": "transformer.vocab_embedding.weight",
    "embedding.position_embeddings.weight": "transformer.position_embedding.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
}
NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_layernorm"}
ROWS_OF_INPUT = {"self_attention.linear_proj": "attention.dense", "mlp.linear_fc2": "mlp.proj"}
"""Cut along what comes in; their biases are added once and whole everywhere."""


def whole(name: str, tensor: Tensor, tp: int) -> Parts:
    return {name: [tensor] * tp}


def output_layer(tensor: Tensor, tp: int) -> Parts:
    """Rows of the vocabulary, padded with zeros to the same number on every rank."""
    return {"lm_head.weight": [_padded(part, -(-tensor.shape[0] // tp)) for part in _row_parts(tensor, tp)]}


def of_layer(name: str, prefix: str, tensor: Tensor, model: Any, gated: bool, tp: int) -> Parts:
    """The parts of a layer's parameter `name`, such as "mlp.linear_fc2.weight", under `prefix`."""
    stem, _, kind = name.rpartition(".")
    if stem in NORMS:
        return whole(f"{prefix}{NORMS[stem]}.{kind}", tensor, tp)
    if stem in ROWS_OF_INPUT:
        # Outputs of the ranks are added: a bias on each of them would count once per rank, so that the engine adds it
        # after the sum.
        parts = [tensor] * tp if kind == "bias" else list(tensor.chunk(tp, 1))
        return {f"{prefix}{ROWS_OF_INPUT[stem]}.{kind}": parts}
    if stem == "self_attention.linear_qkv":
        return {f"{prefix}attention.qkv.{kind}": _query_key_value(tensor, model, tp)}
    if stem == "mlp.linear_fc1" and gated:
        # The half that the activation acts on is `fc`, the other one `gate`.
        activated, other = tensor.chunk(2)
        return {
            f"{prefix}mlp.fc.{kind}": list(activated.chunk(tp)),
            f"{prefix}mlp.gate.{kind}": list(other.chunk(tp)),
        }
    if stem == "mlp.linear_fc1":
        return {f"{prefix}mlp.fc.{kind}": list(tensor.chunk(tp))}
    raise KeyError(name)


def _query_key_value(tensor: Tensor, model: Any, tp: int) -> list[Tensor]:
    """From rows grouped by key-value head to all queries, all keys, all values of each rank.

    With more ranks than key-value heads each head is on several ranks.
    """
    groups, per_group, size = model.query_groups, model.num_attention_heads // model.query_groups, model.head_dim
    # [groups, queries of one + 2, D, ...]
    grouped = tensor.unflatten(0, (groups, per_group + 2, size))
    # [heads * D, ...]; keys and values [groups * copies * D, ...]
    queries = grouped[:, :per_group].flatten(0, 2)
    # tp a multiple of the groups: the copies of a head are on neighbouring ranks.
    copies = max(tp // groups, 1)
    keys, values = (grouped[:, per_group + i].repeat_interleave(copies, 0).flatten(0, 1) for i in range(2))
    return [torch.cat(parts) for parts in zip(*(x.chunk(tp) for x in (queries, keys, values)), strict=True)]


def _row_parts(tensor: Tensor, parts: int) -> Sequence[Tensor]:
    # The last part may be shorter, or empty.
    size = -(-tensor.shape[0] // parts)
    return [tensor[min(i * size, len(tensor)) : (i + 1) * size] for i in range(parts)]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
UNUSED = (
    "target_virtual_pipeline_parallel_size", "target_expert_parallel_size", "target_expert_tensor_parallel_size",
    "make_vocab_size_divisible_by", "max_shard_size",
)  # fmt: skip


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write rank0.safetensors and on: rank = stage * tensor parallel size + tensor-parallel rank.

    Raises ConfigError for options and models that have no such checkpoint. The tokenizer's files go along, since
    `trtllm-build` is given the same directory.
    """
    refuse("trtllm", options, *UNUSED, why="its files are one for each rank of tensor and pipeline parallel")
    refuse_megatron("trtllm", options, NOT_MEGATRON)
    model = model_config(source, host).model
    require_expressible(model, options)
    dtype = str(source.dtypes()[MODEL + EMBEDDING]).removeprefix("torch.")
    config = write_config(model, dtype, options)
    identity = getattr(source, "identity", None)
    key = work_key("trtllm", identity, config) if identity else None
    with closing(ResumableFolder(path, key)) as folder:
        ranks = []
        for stage in range(options.target_pipeline_parallel_size):
            ranks += _write_stage(folder, stage, _Stage(source, model, options, stage))
        small = {"config.json": (json.dumps(config, indent=2) + "\n").encode(), **source.files()}
        for name, data in small.items():
            folder.write_small(name, data)
        folder.commit({*ranks, *small})


def _write_stage(folder: ResumableFolder, number: int, stage: _Stage) -> list[str]:
    """Write the files of one stage together, each tensor read once; returns their names."""
    files = [f"rank{number * stage.tp + i}.safetensors" for i in range(stage.tp)]
    if all(folder.finished(file) is not None for file in files):
        return files
    planned = [stage.infos(rank) for rank in range(stage.tp)]
    with ExitStack() as stack:
        writers = [
            # PENDING_BYTES is for the stage: its writers share it.
            stack.enter_context(closing(SafetensorsWriter(folder.content / file, infos, PENDING_BYTES // stage.tp)))
            for file, infos in zip(files, planned, strict=True)
        ]
        # planned[0]: ranks have equal names and dtypes, hence one order.
        for parts in stage.values(list(planned[0])):
            for writer, part in zip(writers, parts, strict=True):
                writer.add(part)
        for file, writer in zip(files, writers, strict=True):
            folder.finish(file, writer.finish())
    return files


class _Stage:
    """The tensors of one pipeline stage, as each tensor-parallel rank has them."""

    def __init__(self, source: CheckpointReader, model: Any, options: ConvertOptions, number: int) -> None:
        self.tp = options.target_tensor_parallel_size
        self._source, self._model = source, model
        self._gated = getattr(model, "activation", "swiglu") in GATED
        self._ours = list(self._wanted(number, options.target_pipeline_parallel_size))
        shapes, dtypes = source.shapes(), source.dtypes()
        self._empty: dict[str, Parts] = {
            # Shapes by cutting meta tensors with the same function that cuts the values.
            target: self._parts(ours, target, torch.empty(shapes[ours], dtype=dtypes[ours], device="meta"))
            for ours, target in self._ours
        }

    def infos(self, rank: int) -> dict[str, TensorInfo]:
        """What the file of a rank holds, in the order of writing."""
        found = {
            name: TensorInfo(tuple(parts[rank].shape), parts[rank].dtype)
            for made in self._empty.values()
            for name, parts in made.items()
        }
        return align(found)

    def values(self, order: list[str]) -> Iterator[list[Tensor]]:
        """For each name in the order of the files, the parts of all ranks."""
        made_of = {name: (ours, target) for ours, target in self._ours for name in self._empty[target]}
        last: str | None = None
        parts: Parts = {}
        for name in order:
            ours, target = made_of[name]
            # Names of one canonical tensor follow one another, also after `align`: they have one dtype.
            if target != last:
                parts = {}  # before the next is read
                parts, last = self._parts(ours, target, self._source.read(ours)), target
            yield parts[name]

    def _wanted(self, stage: int, stages: int) -> Iterator[tuple[str, str]]:
        """(canonical name, what it is written as) of this stage: layers are numbered from 0 in each."""
        # The first stages have one layer more, as TensorRT-LLM divides them.
        per_stage, further = divmod(self._model.num_layers, stages)
        first = stage * per_stage + min(stage, further)
        layers = range(first, first + per_stage + (stage < further))
        names = [name for name in self._source.shapes() if name.startswith(MODEL)]
        for name in names:
            bare = name.removeprefix(MODEL)
            if bare.startswith("decoder.layers."):
                layer, _, rest = bare.removeprefix("decoder.layers.").partition(".")
                if int(layer) in layers:
                    yield name, f"transformer.layers.{int(layer) - first}.|{rest}"
            elif bare in TOP and stage == (0 if bare.startswith("embedding.") else stages - 1):
                yield name, TOP[bare]
        if stage == stages - 1:
            # Tied or not, the file has an LM head.
            untied = MODEL + OUTPUT in names
            yield MODEL + (OUTPUT if untied else EMBEDDING), "lm_head.weight"

    def _parts(self, ours: str, target: str, tensor: Tensor) -> Parts:
        if target == "lm_head.weight":
            return output_layer(tensor, self.tp)
        prefix, inside, name = target.partition("|")
        if not inside:
            return whole(target, tensor, self.tp)
        return of_layer(name, prefix, tensor, self._model, self._gated, self.tp)

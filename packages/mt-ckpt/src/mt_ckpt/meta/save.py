"""Writes Llama as Meta publishes it: params.json and a consolidated.NN.pth for each model-parallel rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.hugging_face.family import family_named
from mt_ckpt.hugging_face.outputs import Outputs
from mt_ckpt.meta.params import EMBEDDING, OUTPUT, from_hugging_face, of_llama_3
from mt_ckpt.meta.reader import IN_LAYER, PARAMS, TOP, cut_along
from mt_ckpt.model import model_config
from mt_ckpt.pickles.encode import Call, OrderedItems
from mt_ckpt.pickles.torch_file import TorchWriter
from mt_ckpt.writing.file_plans import WrittenFile
from mt_ckpt.writing.options import refuse
from mt_ckpt.writing.resumable import ResumableFolder, work_key
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

UNUSED = (
    "target_pipeline_parallel_size", "target_virtual_pipeline_parallel_size", "target_expert_parallel_size",
    "target_expert_tensor_parallel_size", "make_vocab_size_divisible_by", "max_shard_size",
)  # fmt: skip
ROTATED = ("attention.wq.weight", "attention.wk.weight")
TOKENIZER = "tokenizer.model"


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write a file for each rank of `target_tensor_parallel_size`, and the tokenizer's file if there is one.

    Raises ConfigError for options and models that Meta's code does not have, CheckpointError, and OSError.
    """
    refuse("meta", options, *UNUSED, why="its files are one for each rank of tensor parallelism")
    config = model_config(source, host)
    family = family_named(config.model.family, host)
    params = from_hugging_face(family.write_config(config.model))
    model = _Model(Outputs(source, family, config.model), params, options.target_tensor_parallel_size)
    identity = getattr(source, "identity", None)
    with closing(
        ResumableFolder(path, work_key("meta", identity, params, model.ranks) if identity else None)
    ) as folder:
        files = [f"consolidated.{rank:02d}.pth" for rank in range(model.ranks)]
        # All files of a conversion are written together, so that each tensor is read once; one that is missing costs
        # all.
        if any(folder.finished(file) is None for file in files):
            _write(folder, files, model)
        small = {PARAMS: (json.dumps(params, indent=2) + "\n").encode()}
        small |= {name: data for name, data in source.files().items() if takes_file(name)}
        for name, data in small.items():
            folder.write_small(name, data)
        folder.commit({*files, *small})


def takes_file(name: str) -> bool:
    return name == TOKENIZER


class _Model:
    """The tensors under Meta's names, cut for `ranks`. Raises ConfigError for sizes that the ranks do not divide."""

    def __init__(self, outputs: Outputs, params: Mapping[str, Any], ranks: int) -> None:
        self.ranks, self._outputs, self._params = ranks, outputs, params
        for name in outputs.infos:
            _meta_name(name)  # before anything is written
        _require_divided(params, outputs, ranks)
        self.tied = "lm_head.weight" not in outputs.infos
        if self.tied and ranks > 1 and not of_llama_3(params):
            raise ConfigError(
                f"--target-tensor-parallel-size {ranks}: before Llama 3 Meta cuts the embedding along the hidden size "
                "and the output along the vocabulary, so that tied ones are not one tensor; leave it out"
            )

    def read(self) -> Any:
        """(name, the parts of all ranks) one by one."""
        # values() reads each canonical tensor once, since parts of one (queries, keys, values) follow one another.
        for name, tensor in zip(self._outputs.infos, self._outputs.values(self._outputs.infos), strict=True):
            renamed = _meta_name(name)
            if renamed.endswith(ROTATED):
                kind = "n_heads" if ".wq." in renamed else "n_kv_heads"
                tensor = halves_to_neighbours(tensor, self._params[kind])
            yield renamed, self._cut(renamed, tensor)

    def _cut(self, name: str, tensor: Tensor) -> list[Tensor]:
        if tensor.ndim < 2:
            return [tensor] * self.ranks
        # As Meta's own classes: ParallelEmbedding up to Llama 2 (hidden size), VocabParallelEmbedding since.
        along = 0 if of_llama_3(self._params) else 1
        return list(tensor.chunk(self.ranks, along if name == EMBEDDING else cut_along(name)))


def halves_to_neighbours(rows: Tensor, heads: int) -> Tensor:
    """[heads * D, ...]: the row of channel p D / 2 + j of a head becomes that of channel 2 j + p."""
    # [heads * D, ...] -> [heads, 2, D / 2, ...] -> [heads, D / 2, 2, ...] -> [heads * D, ...]
    halves = rows.unflatten(0, (heads, 2, -1))
    return torch.movedim(halves, 1, 2).flatten(0, 2)


def _write(folder: ResumableFolder, files: list[str], model: _Model) -> None:
    """Write all files together, each tensor read once."""
    with ExitStack() as stack:
        streams = [stack.enter_context(WrittenFile(folder.content / file)) for file in files]
        writers = [TorchWriter(stream, Path(file).stem) for stream, file in zip(streams, files, strict=True)]
        contents: list[dict[str, Call]] = [{} for _ in files]
        for name, parts in model.read():
            for content, writer, part in zip(contents, writers, parts, strict=True):
                content[name] = writer.add(part)
            del parts  # before the next is read
        for content, writer, file, stream in zip(contents, writers, files, streams, strict=True):
            # Meta's module has both; one storage for the two says that they are tied.
            writer.finish(OrderedItems({**content, OUTPUT: content[EMBEDDING]} if model.tied else content))
            folder.finish(file, stream.sync())


def _require_divided(params: Mapping[str, Any], outputs: Outputs, ranks: int) -> None:
    width = outputs.infos["model.layers.0.mlp.gate_proj.weight"].shape[0]
    for key, number in (
        ("num_query_groups", params["n_kv_heads"]),
        ("vocab_size", params["vocab_size"]),
        ("ffn_hidden_size", width),
        ("hidden_size", params["dim"]),
    ):
        if number % ranks:
            raise ConfigError(f"--target-tensor-parallel-size {ranks} does not divide model.{key}={number}")


def _meta_name(name: str) -> str:
    names = {theirs: meta for meta, theirs in TOP.items()}
    if name in names:
        return names[name]
    layer, _, inside = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    in_layer = {theirs: meta for meta, theirs in IN_LAYER.items()}
    if inside not in in_layer:
        raise ConfigError(f"meta holds Llama's language models only; it has no name for {name}")
    return f"layers.{layer}.{in_layer[inside]}.weight"

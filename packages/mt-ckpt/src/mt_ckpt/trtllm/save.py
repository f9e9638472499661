"""Writes TensorRT-LLM checkpoints: config.json and a safetensors file for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import PENDING_BYTES, SafetensorsWriter, TensorInfo, align
from mt_ckpt.hugging_face.activation_scales import ActivationScales
from mt_ckpt.model import model_config
from mt_ckpt.trtllm.config import GATED, GPT, architecture_of, require_expressible, write_config
from mt_ckpt.trtllm.quantization import NOT_QUANTIZED, Awq, Linear, Quantization, quantization_named
from mt_ckpt.trtllm.shards import NORMS, ROWS_OF_INPUT, TOP, Parts, of_layer, output_layer, whole
from mt_ckpt.writing.options import NOT_MEGATRON, refuse, refuse_megatron
from mt_ckpt.writing.resumable import ResumableFolder, work_key
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
QUERY_KEY_VALUE = ".self_attention.linear_qkv.weight"
KEPT_BYTES = 64 << 20
"""Small parts of quantized weights that are kept until their place in the file comes."""
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
    quantization = NOT_QUANTIZED if options.quantize is None else quantization_named(options.quantize)
    model = model_config(source, host).model
    require_expressible(model, options)
    require_norm(model, quantization)
    dtype = str(source.dtypes()[MODEL + EMBEDDING]).removeprefix("torch.")
    config = write_config(model, dtype, options, quantization.settings())
    # All of them, before a tensor is read: they say what cannot be quantized.
    stages = [
        Stage(source, model, options, quantization, number) for number in range(options.target_pipeline_parallel_size)
    ]
    identity = getattr(source, "identity", None)
    key = work_key("trtllm", identity, config, options.quantize) if identity else None
    with closing(ResumableFolder(path, key)) as folder:
        ranks = []
        for number, stage in enumerate(stages):
            ranks += _write_stage(folder, number, stage)
        small = {"config.json": (json.dumps(config, indent=2) + "\n").encode(), **source.files()}
        for name, data in small.items():
            folder.write_small(name, data)
        folder.commit({*ranks, *small})


def require_norm(model: Any, quantization: Quantization) -> None:
    linear = quantization.linear
    if linear is not None and linear.rms_norm_only and architecture_of(model) == GPT:
        raise ConfigError(
            f"--quantize {quantization.name}: TensorRT-LLM rounds the inputs of {linear.algorithm} in an RMSNorm, "
            f"and model.normalization={model.normalization}; fp8-static and int8 are for this model, too"
        )


def _write_stage(folder: ResumableFolder, number: int, stage: Stage) -> list[str]:
    """Write the files of one stage together; returns their names."""
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


class Stage:
    """The tensors of one pipeline stage, as each tensor-parallel rank has them."""

    def __init__(
        self,
        source: CheckpointReader,
        model: Any,
        options: ConvertOptions,
        quantization: Quantization,
        number: int,
    ) -> None:
        """Raises ConfigError for a weight that cannot be quantized."""
        self.tp = options.target_tensor_parallel_size
        self._source, self._model, self._quantization = source, model, quantization
        self._scales: ActivationScales | None = getattr(source, "activation_scales", None)
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
        infos = {
            name: TensorInfo(tuple(parts[rank].shape), parts[rank].dtype)
            for tensors in self._empty.values()
            for name, parts in tensors.items()
        }
        return align(infos)

    def values(self, order: list[str]) -> Iterator[list[Tensor]]:
        """For each name in the order of the files, the parts of all ranks. Files have larger elements first, so that
        what a quantized weight is made of is apart: small parts are kept, others are made again."""
        made_of = {name: (ours, target) for ours, target in self._ours for name in self._empty[target]}
        last: str | None = None
        parts: Parts = {}
        kept: Parts = {}
        for name in order:
            if name in kept:
                yield kept.pop(name)
                continue
            ours, target = made_of[name]
            if target != last:
                parts = {}  # before the next is read
                parts, last = self._parts(ours, target, self._source.read(ours)), target
                kept |= _small(parts, name, kept)
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
        parts = of_layer(name, prefix, tensor, self._model, self._gated, self.tp)
        stem, _, kind = name.rpartition(".")
        if kind == "weight" and stem not in NORMS:
            parts = self._quantized(ours, parts, cut_inputs=stem in ROWS_OF_INPUT)
        return parts

    def _quantized(self, ours: str, parts: Parts, *, cut_inputs: bool) -> Parts:
        """The parts of a matrix in the scheme, with the scale of keys and values beside the weight that makes them."""
        encoded: Parts = {}
        for name, matrices in parts.items():
            encoded |= self._encoded(ours, name, matrices, cut_inputs=cut_inputs)
        if self._quantization.kv_cache and ours.endswith(QUERY_KEY_VALUE):
            (name,) = parts
            # As ModelOpt does: 1 unless something of the cache was larger than FP8's largest number.
            scale = max(1.0, (self._scales and self._scales.of_cache(ours)) or 1.0)
            encoded[name.replace("qkv.weight", "kv_cache_scaling_factor")] = [torch.tensor([scale])] * self.tp
        return encoded

    def _encoded(self, ours: str, name: str, matrices: list[Tensor], *, cut_inputs: bool) -> Parts:
        scheme = self._quantization.linear
        if scheme is None:
            return {name: matrices}
        if objection := scheme.objection(tuple(matrices[0].shape)):
            hint = "; awq takes the size of its groups, such as awq-g64" if isinstance(scheme, Awq) else ""
            raise ConfigError(
                f"--quantize {self._quantization.name}: {name} of a rank cannot be quantized: {objection}{hint}"
            )
        scale = self._input_scale(ours) if scheme.needs_input_scales else None
        encoded = scheme.encode(Linear(matrices, cut_inputs, scale))
        return {f"{name.removesuffix('weight')}{part}": tensors for part, tensors in encoded.items()}

    def _input_scale(self, ours: str) -> float:
        scale = None if self._scales is None else self._scales.of_inputs(ours)
        if scale is None:
            raise ConfigError(
                f"--quantize {self._quantization.name}: the source says nothing of the inputs of "
                f"{ours.removeprefix(MODEL)}; it has to be a folder in FP8 with a static input_scale for each matrix, "
                "such as ModelOpt writes; fp8 needs none"
            )
        return scale


def _small(parts: Parts, name: str, kept: Parts) -> Parts:
    """What of a weight's parts is kept for later, in the place of encoding it again."""
    room = KEPT_BYTES - sum(tensor.nbytes for tensors in kept.values() for tensor in tensors)
    most = max(tensor.nbytes for tensors in parts.values() for tensor in tensors)
    chosen: Parts = {}
    for other, tensors in parts.items():
        size = sum(tensor.nbytes for tensor in tensors)
        if other != name and tensors[0].nbytes < most // 8 and size <= room:
            chosen[other], room = tensors, room - size
    return chosen

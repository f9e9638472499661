"""Writes GPT-2 in the layout, for any tensor and pipeline parallel sizes that divide it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.checksum import checksum_range
from mt_ckpt.files.staging import sync_file
from mt_ckpt.hugging_face.family import family_named
from mt_ckpt.model import model_config
from mt_ckpt.pickles.encode import Global, Object
from mt_ckpt.pickles.torch_file import TorchWriter
from mt_ckpt.transformers_megatron.reader import CUT_ALONG, EMBEDDING, ENCODER, HEAD, POSITIONS, WORDS, layer_of
from mt_ckpt.writing.options import NOT_MEGATRON, refuse, refuse_megatron
from mt_ckpt.writing.resumable import ResumableFolder, work_key
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

FORMAT = "transformers-megatron"
UNUSED = (
    "target_virtual_pipeline_parallel_size", "target_expert_parallel_size", "target_expert_tensor_parallel_size",
    "max_shard_size",
)  # fmt: skip
ACTIVATIONS = {"gelu": False, "gelu_tanh": True}
"""Activation -> the argument openai_gelu."""
OPTIMIZER = {
    "optimizer": {
        "step": 0,
        "param_groups": [
            {
                "lr": 0.0,
                "beta1": 0.0,
                "beta2": 0.0,
                "eps": 0.0,
                "weight_decay": 0.0,
                "correct_bias": False,
                "params": [],
            }
        ],
    }
}
"""The empty state that the tool writes so that Megatron finds one."""


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write the tracker and a file for each rank. Raises ConfigError for models that are no GPT-2 and sizes that
    do not divide it."""
    refuse(FORMAT, options, *UNUSED, why="its files are one for each rank of tensor and pipeline parallel")
    refuse_megatron(FORMAT, options, NOT_MEGATRON)
    model = model_config(source, host).model
    _require_gpt2(model, options, host)
    arguments = _arguments(model, source.dtypes()[MODEL + WORDS], options)
    identity = getattr(source, "identity", None)
    tp, pp = options.target_tensor_parallel_size, options.target_pipeline_parallel_size
    with closing(ResumableFolder(path, work_key(FORMAT, identity) if identity else None)) as folder:
        names: set[str] = set()
        for stage in range(pp):
            files = [_file(rank, stage if pp > 1 else None) for rank in range(tp)]
            names.update(files)
            if any(folder.finished(file) is None for file in files):
                _write_stage(folder, files, _entries(source, model, stage, pp), arguments)
        tracker = "latest_checkpointed_iteration.txt"
        folder.write_small(tracker, b"release")
        folder.commit({*names, tracker})


def _file(rank: int, stage: int | None) -> str:
    suffix = "" if stage is None else f"_{stage:03d}"
    return f"release/mp_rank_{rank:02d}{suffix}/model_optim_rng.pt"


def _write_stage(
    folder: ResumableFolder,
    files: list[str],
    entries: Iterator[tuple[tuple[str, ...], str, Tensor, int | None]],
    arguments: Mapping[str, Any],
) -> None:
    """Write the files of a stage together, each tensor read once."""
    with ExitStack() as stack:
        streams = []
        for file in files:
            (folder.content / file).parent.mkdir(parents=True, exist_ok=True)
            streams.append(stack.enter_context((folder.content / file).open("w+b")))
        writers = [TorchWriter(stream) for stream in streams]
        contents: list[dict[str, Any]] = [{} for _ in files]
        for key, name, tensor, dim in entries:
            # Only at the time of writing: the source has true vocabularies.
            if key in (HEAD, (*EMBEDDING, "word_embeddings")):
                tensor = _pad(tensor, arguments["padded_vocab_size"])
            parts = [tensor] * len(files) if dim is None else list(tensor.chunk(len(files), dim))
            for content, writer, part in zip(contents, writers, parts, strict=True):
                # chunk gives views of one tensor; a writer takes the bytes of each part alone.
                _at(content, key)[name] = writer.add(part.contiguous())
        for content, writer in zip(contents, writers, strict=True):
            # The tool writes its arguments so, and its reader takes attributes.
            namespace = Object(Global("types", "SimpleNamespace"), dict(arguments))
            writer.finish({**content, "checkpoint_version": 3.0, "args": namespace, "optimizer": OPTIMIZER})
    # The files are read again for their checksums: the writers above do not hash.
    for file in files:
        written = folder.content / file
        sync_file(written)
        num_bytes = written.stat().st_size
        folder.finish(file, [(num_bytes, checksum_range(written, 0, num_bytes, lambda count: None))])


def _entries(
    source: CheckpointReader, model: Any, stage: int, stages: int
) -> Iterator[tuple[tuple[str, ...], str, Tensor, int | None]]:
    """(path of dictionaries, name, whole tensor, dimension to cut) of everything on a stage."""
    per_stage = model.num_layers // stages
    if stage == 0:
        yield (*EMBEDDING, "position_embeddings"), "weight", source.read(MODEL + POSITIONS), None
        yield (*EMBEDDING, "word_embeddings"), "weight", source.read(MODEL + WORDS), 0
    for name in source.shapes():
        place = layer_of(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        if place is not None and place[0] // per_stage == stage:
            number, inside = place
            yield ENCODER, f"layers.{number % per_stage}.{inside}", source.read(name), CUT_ALONG.get(inside)
    if stage == stages - 1:
        for kind in ("weight", "bias"):
            yield ENCODER, f"final_layernorm.{kind}", source.read(f"{MODEL}decoder.final_layernorm.{kind}"), None
        # On the only stage too: Megatron's last stage has the copy whether or not it is the first.
        yield HEAD, "weight", source.read(MODEL + WORDS), 0


def _at(content: dict[str, Any], key: tuple[str, ...]) -> dict[str, Any]:
    for part in key:
        content = content.setdefault(part, {})
    return content


def _pad(tensor: Tensor, rows: int) -> Tensor:
    """The vocabulary padded as the tool does: the last row over and over."""
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor[-1:].expand(missing, -1)]) if missing else tensor


# -- configuration ----------------------------------------------------------------------------------


def _require_gpt2(model: Any, options: ConvertOptions, host: PluginHost) -> None:
    if model.family != "gpt":
        raise ConfigError(f"{FORMAT} holds GPT-2 only, of the family gpt; this one has model.family={model.family}")
    kind = family_named(model.family, host).write_config(model)["model_type"]
    if kind != "gpt2":
        raise ConfigError(f"{FORMAT} holds GPT-2 only; a gpt of this kind is a {kind}")
    if model.untie_embeddings_and_output_weights or model.activation not in ACTIVATIONS:
        raise ConfigError(
            f"{FORMAT} holds GPT-2 with tied embeddings and activation gelu or gelu_tanh; this one has "
            f"model.untie_embeddings_and_output_weights={model.untie_embeddings_and_output_weights}, "
            f"model.activation={model.activation}"
        )
    for flag, size, key, number in (
        ("tensor", options.target_tensor_parallel_size, "num_attention_heads", model.num_attention_heads),
        # chunk would make the last rank's part smaller.
        ("tensor", options.target_tensor_parallel_size, "ffn_hidden_size", model.ffn_size),
        ("pipeline", options.target_pipeline_parallel_size, "num_layers", model.num_layers),
    ):
        if number % size:
            raise ConfigError(f"--target-{flag}-parallel-size {size} does not divide model.{key}={number}")


def _arguments(model: Any, dtype: torch.dtype, options: ConvertOptions) -> dict[str, Any]:
    """What the tool puts into `args`."""
    tp = options.target_tensor_parallel_size
    divisor = options.make_vocab_size_divisible_by or model.make_vocab_size_divisible_by
    multiple = divisor * tp
    return {
        "orig_vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_size,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": options.target_pipeline_parallel_size,
        "data_parallel_size": 1,
        "make_vocab_size_divisible_by": divisor,
        "rank": 0,
        "tokenizer_type": "GPT2BPETokenizer",
        "bias_gelu_fusion": False,
        "openai_gelu": ACTIVATIONS[model.activation],
        "params_dtype": dtype,
        "padded_vocab_size": -(-model.vocab_size // multiple) * multiple,
    }

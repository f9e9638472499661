"""Writes a checkpoint as `save_pretrained` does: safetensors, config.json, the tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_ckpt.files.safetensors import TensorInfo, align, split_by_size
from mt_ckpt.hugging_face.family import Family
from mt_ckpt.hugging_face.outputs import Outputs
from mt_ckpt.hugging_face.quantized_outputs import MXFP4_EXPERTS, Mxfp4Experts, QuantizedOutputs
from mt_ckpt.hugging_face.reader import CONFIG
from mt_ckpt.hugging_face.tokenizer import (
    DECODER_START,
    GENERATION,
    PREPROCESSOR,
    files_to_write,
    generation_defaults,
    special_ids,
)
from mt_ckpt.hugging_face.variants import family_of_config
from mt_ckpt.model import model_config
from mt_ckpt.quantized.calibrated import CalibratedWeights
from mt_ckpt.quantized.schemes import quantizer_named
from mt_ckpt.writing.file_plans import SafetensorsFiles, write_files
from mt_ckpt.writing.options import refuse_layout
from mt_ckpt.writing.output_folders import output_folder
from mt_ckpt.writing.resumable import work_key
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.errors import CheckpointError, ConfigError, DataError, PluginError
from mt_core.interfaces import Tokenizer
from mt_core.plugins import PluginHost
from mt_core.train.build import restore_tokenizer

MAX_SHARD_BYTES = 5 * 1000**3
INDEX = "model.safetensors.index.json"
EOS = "eos_token_id"


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write `source` so that `from_pretrained` loads it.

    Raises ConfigError for options and models that the format cannot express, CheckpointError for tensors that are not
    the model's, and OSError. Only the model is written; the format has no place for an optimizer.
    """
    save_folder(path, source, options, host)


def save_folder(
    path: Path,
    source: CheckpointReader,
    options: ConvertOptions,
    host: PluginHost,
    *,
    calibrated: CalibratedWeights | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """`convert_checkpoint`, with codes and scales that calibration has chosen for options.quantize, and further files.

    Raises what that raises.
    """
    plan = _plan(source, options, host, calibrated)
    shards = plan.files.files
    # Made before a tensor is written, so that what the format cannot hold is refused at once.
    small = {**(beside or {}), **plan.preprocessor, **_small_files(source, plan.config, plan.tensors, shards, host)}
    key = work_key("hf", getattr(source, "identity", None), {name: list(shard) for name, shard in shards.items()})
    with closing(output_folder(path, key if hasattr(source, "identity") else None)) as folder:
        write_files(folder, plan.files, source)
        for name, data in small.items():
            folder.write_small(name, data)
        folder.commit({*shards, *small})


def plan_files(source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> SafetensorsFiles:
    """The files of `convert_checkpoint` that hold tensors; raises ConfigError and CheckpointError as that does."""
    return _plan(source, options, host).files


@dataclass(frozen=True)
class _Plan:
    """config: the contents of config.json. preprocessor: the file of that name, of a family that has one."""

    config: dict[str, Any]
    preprocessor: Mapping[str, bytes]
    tensors: Outputs | QuantizedOutputs | Mxfp4Experts
    files: SafetensorsFiles


def _plan(
    source: CheckpointReader, options: ConvertOptions, host: PluginHost, calibrated: CalibratedWeights | None = None
) -> _Plan:
    refuse_layout("hf", options)
    config = model_config(source, host)
    family = family_of_config(config, host)
    external = family.write_config(config.model)  # first: it names the key of what the format cannot hold
    unquantized = Outputs(source, family, config.model)
    external = {**external, "torch_dtype": _dtype_name(unquantized.infos)}
    tensors: Outputs | QuantizedOutputs | Mxfp4Experts = unquantized
    if options.quantize == MXFP4_EXPERTS:
        tensors = Mxfp4Experts(unquantized)
        external |= tensors.settings
    elif options.quantize is not None:
        quantizer = quantizer_named(options.quantize)
        tensors = QuantizedOutputs(unquantized, quantizer, calibrated)
        external |= quantizer.settings(tensors.left)
    shards = _shard_names(split_by_size(tensors.infos, options.max_shard_size or MAX_SHARD_BYTES))
    # Shards are cut in the order of the model; within a shard larger elements come first.
    files = SafetensorsFiles({name: align(shard) for name, shard in shards.items()}, tensors.values, tensors.made_of)
    return _Plan(external, _preprocessor(source, family, config.model), tensors, files)


def _preprocessor(source: CheckpointReader, family: Family, model: Any) -> dict[str, bytes]:
    if family.preprocessor is None:
        return {}
    return {PREPROCESSOR: _json(family.preprocessor.write(model, source.metadata["config"].get("data") or {}))}


def _shard_names(shards: Any) -> dict[str, dict[str, TensorInfo]]:
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


# -- the files beside the weights -------------------------------------------------------------------


def _small_files(
    source: CheckpointReader,
    external: Mapping[str, Any],
    tensors: Outputs | QuantizedOutputs | Mxfp4Experts,
    shards: Mapping[str, Mapping[str, TensorInfo]],
    host: PluginHost,
) -> dict[str, bytes]:
    files = files_to_write(source.files(), source.metadata["config"].get("tokenizer") or {})
    tokenizer = _tokenizer_of(source, host)
    if "tokenizer.json" not in files and (written := getattr(tokenizer, "hugging_face_files", None)) is not None:
        # One that is described by its name alone, which no program beside mt knows.
        files |= written()
    if GENERATION not in files and _says_ends(source) and (ids := _ids_of_tokenizer(tokenizer)):
        files[GENERATION] = generation_defaults({**ids, **_decoder_start(source, external, ids)})
    # config.json repeats the ids of generation_config.json, since programs read either.
    # An end of texts that a family writes is one that its weights depend on.
    ids = {key: value for key, value in special_ids(files).items() if key != EOS or key not in external}
    files[CONFIG] = _json({**external, **_taken_ids(ids, external["model_type"], source, host)})
    if len(shards) > 1:
        files[INDEX] = _index(tensors.infos, shards)
    return files


def _says_ends(source: CheckpointReader) -> bool:
    """False for a checkpoint that was converted without a tokenizer: it takes ids as they are, and its end of a text
    would be the last id of the vocabulary, with which no model was trained."""
    stored = source.metadata["config"]
    tokenizer = stored.get("tokenizer") or {}
    takes_ids = tokenizer.get("tokenizer_type") == "NullTokenizer" and tokenizer.get("null_tokenizer_eod_id") is None
    return "train" in stored or not takes_ids


def _taken_ids(ids: Mapping[str, Any], kind: str, source: CheckpointReader, host: PluginHost) -> dict[str, Any]:
    """The ids as config.json of this type has them: some classes refuse several ends, of which it has the first."""
    family = family_of_config(model_config(source, host), host)
    ends = ids.get(EOS)
    # Optional in a family of a plugin.
    if isinstance(ends, list) and kind in getattr(family, "with_one_end", ()):
        return {**ids, EOS: next(iter(ends), None)}
    return dict(ids)


def _decoder_start(source: CheckpointReader, external: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    """The model's, where it says one; else the tokenizer's beginning of a text, with which training began."""
    if DECODER_START not in external:
        return {}
    said = source.metadata["config"]["model"].get(DECODER_START)
    return {
        DECODER_START: external[DECODER_START] if said is not None else ids.get("bos_token_id", external[DECODER_START])
    }


def _tokenizer_of(source: CheckpointReader, host: PluginHost) -> Tokenizer | None:
    """None when it cannot be built here."""
    from mt_core.config.loading import config_from_dict

    stored = source.metadata["config"]
    if "tokenizer" not in stored:
        return None
    try:
        config = config_from_dict({"model": stored["model"], "tokenizer": stored["tokenizer"]}, host)
        return restore_tokenizer(config, source.files(), host)
    except (ConfigError, DataError, PluginError, CheckpointError):
        return None


def _ids_of_tokenizer(tokenizer: Tokenizer | None) -> dict[str, int]:
    """What the tokenizer calls beginning, end and padding."""
    if tokenizer is None:
        return {}
    special = tokenizer.special
    ids = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    return {key: value for key, value in ids.items() if value is not None}


def _dtype_name(infos: Mapping[str, TensorInfo]) -> str:
    """The dtype of most weights."""
    amounts: dict[str, int] = {}
    for info in infos.values():
        name = str(info.dtype).removeprefix("torch.")
        amounts[name] = amounts.get(name, 0) + info.num_bytes
    return max(amounts, key=lambda name: amounts[name])


def _index(infos: Mapping[str, TensorInfo], shards: Mapping[str, Mapping[str, TensorInfo]]) -> bytes:
    places = {name: file for file, shard in shards.items() for name in shard}
    return _json({"metadata": {"total_size": sum(info.num_bytes for info in infos.values())}, "weight_map": places})


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()

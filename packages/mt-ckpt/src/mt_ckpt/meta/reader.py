"""Reads `consolidated.NN.pth` (or `consolidated.safetensors`) with `params.json`: Llama from Meta, Mistral's own.

Both multiply neighbouring channels of a head by the rotary angles; here, as in Hugging Face's format, the two halves
of a head are rotated, so that the rows of queries and keys change their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.checksum_file import WrittenFiles
from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.hugging_face.family import identify
from mt_ckpt.hugging_face.reader import HuggingFaceReader, open_listed_files, open_tensor_file, same_bits
from mt_ckpt.hugging_face.tensors import Renamed, TensorFile, TensorFiles
from mt_ckpt.meta.latent_params import has_latent_attention, of_tower, to_mistral4
from mt_ckpt.meta.latent_params import renamed as latent_names
from mt_ckpt.meta.params import EMBEDDING, OUTPUT, to_hugging_face
from mt_ckpt.pickles.torch_file import NamedTensorsFile
from mt_ckpt.quantized.methods import dequantized
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost

# -- tensors cut over several files by model parallelism ---------------------------------------------

CutAlong = Callable[[str, tuple[int, ...]], int | None]
"""(name, shape of a part) -> the dimension along which it is cut; None: every file holds the same whole tensor"""


class MergedShards:
    """The whole tensors of files that each hold a part of every one (an ExternalTensors).

    Raises CheckpointError when the files do not hold the same names.
    """

    def __init__(self, shards: Sequence[TensorFile], cut_along: CutAlong) -> None:
        names = set(shards[0].tensors)
        for number, shard in enumerate(shards):
            if different := sorted(names ^ set(shard.tensors)):
                raise CheckpointError(f"shards 0 and {number} do not hold the same tensors: {', '.join(different[:8])}")
        self._shards, self._cut_along = shards, cut_along
        self.infos: Mapping[str, TensorInfo] = {name: self._info(name) for name in shards[0].tensors}

    def read(self, name: str) -> Tensor:
        """One whole tensor. Raises CheckpointError when copies of one that is not cut differ."""
        dim = self._dim(name)
        if dim is None:
            # Norms are on every rank; copies that differ mean that the files are of different checkpoints.
            first, *others = (shard.read(name) for shard in self._shards)
            if not all(same_bits(first, other) for other in others):
                raise CheckpointError(f"{name}: the shards' copies of this tensor differ")
            return first
        return torch.cat([shard.read(name) for shard in self._shards], dim)

    def _dim(self, name: str) -> int | None:
        # One file holds whole tensors: `cut_along` could not tell a part from a whole.
        return self._cut_along(name, self._shards[0].tensors[name].shape) if len(self._shards) > 1 else None

    def _info(self, name: str) -> TensorInfo:
        parts = [shard.tensors[name] for shard in self._shards]
        dim = self._dim(name)
        if dim is None or len(parts) == 1:
            return parts[0]
        size = sum(part.shape[dim] for part in parts)
        shape = parts[0].shape
        return TensorInfo((*shape[:dim], size, *shape[dim + 1 :]), parts[0].dtype)


PARAMS = "params.json"
SAFETENSORS = "consolidated.safetensors"
INDEX = "consolidated.safetensors.index.json"
"""Name of the index of a model of Mistral's in several files."""
PTH = re.compile(r"consolidated\.([0-9]{2})\.pth")
TOKENIZERS = ("tokenizer.model", "tokenizer.model.v3")
LLAMA_3_SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>")
"""The first of its ids after the merged ones; the others have no meaning to a base model."""

TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CUT_ALONG_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
FREQUENCIES = "rope.freqs"


def detect(path: Path) -> bool:
    """Whether `path` has params.json and consolidated weights."""
    return (path / PARAMS).is_file() and (bool(_weight_files(path)) or (path / INDEX).is_file())


def open_checkpoint(path: Path, host: PluginHost) -> HuggingFaceReader:
    """Raises CheckpointError for missing and damaged files and tensors that do not fit, ConfigError for unknown
    parameters."""
    written = WrittenFiles(path)
    params = _read_params(path / PARAMS, written)
    if has_latent_attention(params):
        return _open_latent(path, params, written, host)
    shards = [open_tensor_file(file, written) for file in _weight_files(path)]
    if not shards:
        raise CheckpointError(f"{path}: has no consolidated.00.pth and no {SAFETENSORS}")
    merged = MergedShards(shards, lambda name, shape: _cut_along(name, shape, params))
    # Names come from the first file; MergedShards has required them to be equal in all.
    names = list(_without_tied_output(shards))
    external = to_hugging_face(params, {name: merged.infos[name] for name in names})
    renamed = Renamed(merged, {_renamed(name): name for name in names})
    return _reader_of(HalvesRotated(renamed, external), external, path, written, host)


def _open_latent(path: Path, params: Mapping[str, Any], written: WrittenFiles, host: PluginHost) -> HuggingFaceReader:
    """A model of Mistral's with latent attention, whose rows of queries and keys stand as in Hugging Face's format. Of
    one with an image tower the decoder."""
    if (path / INDEX).is_file():
        stored = open_listed_files(path, path / INDEX, written)
    else:
        stored = TensorFiles([open_tensor_file(path / SAFETENSORS, written)])
    named = Renamed(stored, latent_names(stored.infos))
    tensors, external = dequantized(named, to_mistral4(params))
    reader = _reader_of(tensors, external, path, written, host)
    reader.left_out = of_tower(stored.infos)
    return reader


def _reader_of(
    tensors: ExternalTensors, external: Mapping[str, Any], path: Path, written: WrittenFiles, host: PluginHost
) -> HuggingFaceReader:
    family, config = identify(external, tensors.infos, host)
    tokenizer = _tokenizer_file(path)
    files = {} if tokenizer is None else {"tokenizer.model": written.read(tokenizer)}
    metadata = {
        "iteration": 0,
        "config": {
            "model": config.model.model_dump(mode="json"),
            "tokenizer": _tokenizer_config(tokenizer, files, config.model.vocab_size),
        },
    }
    return HuggingFaceReader(tensors, family, config.model, metadata, files)


class HalvesRotated:
    """Tensors under Hugging Face's names, rows of queries and keys brought into its order (an ExternalTensors)."""

    def __init__(self, tensors: ExternalTensors, external: Mapping[str, Any]) -> None:
        self._tensors, self.infos = tensors, tensors.infos
        heads = int(external["num_attention_heads"])
        self._heads = {"q_proj": heads, "k_proj": int(external.get("num_key_value_heads") or heads)}

    def read(self, name: str) -> Tensor:
        tensor = self._tensors.read(name)
        heads = self._heads.get(name.split(".")[-2])
        return tensor if heads is None else neighbours_to_halves(tensor, heads)


def neighbours_to_halves(rows: Tensor, heads: int) -> Tensor:
    """[heads * D, ...]: the row of channel 2 j + p of a head becomes that of channel p D / 2 + j."""
    # [heads * D, ...] -> [heads, D / 2, 2, ...]
    pairs = rows.unflatten(0, (heads, -1, 2))
    # [heads, 2, D / 2, ...] -> [heads * D, ...]. Scores are sums over channels, so that queries and keys may be
    # permuted alike.
    return torch.movedim(pairs, 2, 1).flatten(0, 2)


def _renamed(name: str) -> str:
    match = re.fullmatch(r"layers\.([0-9]+)\.(.+)\.(weight|bias)", name)
    if match and match[2] in IN_LAYER:
        return f"model.layers.{match[1]}.{IN_LAYER[match[2]]}.{match[3]}"
    if name not in TOP:
        raise CheckpointError(f"tensor {name} is not one of Llama's or Mistral's layout")
    return TOP[name]


def _cut_along(name: str, shape: tuple[int, ...], params: Mapping[str, Any]) -> int | None:
    """Meta's layers: columns of what goes back to the residual stream, rows of the rest; vectors are whole.

    Embeddings are cut along the hidden size up to Llama 2, along the vocabulary since Llama 3.
    """
    if len(shape) < 2:
        return None
    if name == EMBEDDING:
        # A rank's part is [vocab, dim / ranks] (Llama 2) or [vocab / ranks, dim] (Llama 3).
        return 0 if shape[1] == params["dim"] else 1
    return cut_along(name)


def cut_along(name: str) -> int:
    """The dimension of a matrix other than the embedding's."""
    return 1 if name.endswith(CUT_ALONG_COLUMNS) else 0


def _without_tied_output(shards: Sequence[TensorFile]) -> Iterator[str]:
    """Names of the tensors; the output is none of them where it is the embedding's own storage in every file."""
    # Meta's module has an output of its own; tied ones share the storage in the file.
    tied = all(isinstance(shard, NamedTensorsFile) and shard.same_storage(EMBEDDING, OUTPUT) for shard in shards)
    return (name for name in shards[0].tensors if not (tied and name == OUTPUT) and name != FREQUENCIES)


# -- files ------------------------------------------------------------------------------------------


def _weight_files(path: Path) -> list[Path]:
    if (path / SAFETENSORS).is_file():
        return [path / SAFETENSORS]
    files = sorted(file for file in path.glob("consolidated.*.pth") if PTH.fullmatch(file.name))
    numbers = [int(PTH.fullmatch(file.name)[1]) for file in files]  # type: ignore[index]
    # A gap would be read as fewer ranks, and the sizes might still fit.
    if numbers != list(range(len(numbers))):
        raise CheckpointError(f"{path}: of the consolidated files some are missing; there are numbers {numbers}")
    return files


def _read_params(file: Path, written: WrittenFiles) -> dict[str, Any]:
    try:
        params = json.loads(written.read(file))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(params, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return params


def _tokenizer_file(path: Path) -> Path | None:
    """`tokenizer.model`, which stands beside the weights or, in Meta's downloads, one folder above."""
    places = (folder / name for name in TOKENIZERS for folder in (path, path.parent))
    return next((file for file in places if file.is_file()), None)


def _tokenizer_config(file: Path | None, files: Mapping[str, bytes], vocab_size: int | None) -> dict[str, Any]:
    if file is None:
        return {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size}
    data, model = files["tokenizer.model"], {"tokenizer_model": str(file)}
    # A SentencePiece model is a protocol buffer that begins with a field of pieces; Llama 3's is lines of base64.
    if data[:1] == b"\n":
        return {"tokenizer_type": "Llama2Tokenizer", **model}
    return {
        "tokenizer_type": "TikTokenizer",
        "tiktoken_pattern": "cl100k",
        "tokenizer_special_tokens": list(LLAMA_3_SPECIAL_TOKENS),
        # Ids behind the merged tokens, one of which is on each line.
        "tiktoken_num_special_tokens": (vocab_size or 0) - len(data.splitlines()),
        **model,
    }

"""An open checkpoint of Megatron-LM from before Megatron-Core, as canonical tensors: GPT and BERT.

The optimizer's state is read where it is tied to the parameters as it is today; else the metadata says why it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.megatron.folder import rank_folders
from mt_ckpt.megatron.names import EMBEDDING, layer_counts
from mt_ckpt.megatron.optimizer import OptimizerState, read_optimizer
from mt_ckpt.megatron.pieces import Piece
from mt_ckpt.megatron.rank_files import Iteration, Parameter, RankFile, namespace_attributes, open_iteration
from mt_ckpt.megatron.reader import MegatronReader
from mt_ckpt.megatron_legacy.names import STACK, as_encoder, is_bert, to_core
from mt_ckpt.pickles.torch_file import StoredTensor, tensors_in
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import ParameterLayout
from mt_core.plugins import PluginHost

# -- order of queries, keys and values, by the checkpoint's version ----------------------------------
#
# N heads of D channels on a rank; rows are 3ND.
#
# | version | rows |
# | --- | --- |
# | 0 | [3, N, D]: all queries, then all keys, then all values |
# | 1 | [N, D, 3]: for each channel its query, key and value |
# | 2, 3 | [N, 3, D]: for each head its queries, keys and values, as today |

LATEST = 3.0
GROUPED_SINCE = 2.0


def to_grouped(tensor: Tensor, heads: int, version: float) -> Tensor:
    """[3ND, ...] of a version -> today's order. heads: of the rank."""
    rest = tensor.shape[1:]
    # Before version 2 there was no grouped attention: queries, keys and values have equal numbers of heads.
    size = tensor.shape[0] // (3 * heads)
    if version >= GROUPED_SINCE:
        return tensor
    if version >= 1.0:
        # [heads, size, 3] -> [heads, 3, size]
        return tensor.view(heads, size, 3, *rest).transpose(1, 2).reshape(tensor.shape)
    # [3, heads, size] -> [heads, 3, size]
    return tensor.view(3, heads, size, *rest).transpose(0, 1).reshape(tensor.shape)


@dataclass(frozen=True)
class Regrouped:
    """A rank's queries, keys and values of an older version, read in today's order."""

    piece: Piece
    heads: int
    version: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.piece.dtype

    def read(self) -> Tensor:
        return to_grouped(self.piece.read(), self.heads, self.version)


HEAD_SIZE = 64
"""Arguments of the models that were published without their arguments: BERT and GPT-2 with 345 million parameters."""
OTHERS: Mapping[str, str] = {
    "vision_model.": "a model of images and text",
    "query_model.": "two encoders of questions and texts",
    "context_model.": "two encoders of questions and texts",
    "shared_model.": "one encoder of questions and texts",
    "language_model.decoder.": "the T5 from before Megatron-Core",
}
"""How parameters begin of models that mention a language model too."""
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")


def open_checkpoint(path: Path, host: PluginHost, vocab_size: int | None = None) -> MegatronReader:
    """Open the iteration at `path`, or the one that the tracker in `path` names.

    vocab_size: see `mt_ckpt.megatron.reader.open_checkpoint`. Raises CheckpointError and ConfigError as that does.
    """
    iteration = open_iteration(Path(path), legacy_tensors, arguments_of)
    return MegatronReader(_as_core(iteration), host, vocab_size, optimizer_if_known)


def optimizer_if_known(iteration: Iteration, layouts: Mapping[str, ParameterLayout]) -> OptimizerState:
    """The same as `read_optimizer`; a state that cannot be tied to the parameters is left out, with the reason."""
    # The weights are what old checkpoints are read for: a state that does not fit is no reason to refuse them.
    try:
        return read_optimizer(iteration, layouts)
    except CheckpointError as error:
        return OptimizerState({}, None, str(error))


def legacy_tensors(part: Mapping[str, Any], file: Path) -> Mapping[str, StoredTensor]:
    """A model of nested dictionaries, under Megatron-Core's names. Raises CheckpointError for one name twice."""
    renamed: dict[str, StoredTensor] = {}
    tensors = tensors_in(part)
    for prefix, model in OTHERS.items():
        if any(old.startswith(prefix) for old in tensors):
            raise ConfigError(
                f"{file}: has parameters {prefix}*, of {model}, which is not read from Megatron's formats"
            )
    for old, tensor in tensors.items():
        name = to_core(old)
        if name in renamed:
            raise CheckpointError(f"{file}: {old} and another tensor are both {name}")
        renamed[name] = tensor
    return renamed


def arguments_of(content: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The stored arguments, or for the models that were published without any, what their tensors' shapes say."""
    return namespace_attributes(content, file) if content.get("args") is not None else _inferred(content, file)


def _inferred(content: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    tensors = legacy_tensors(content["model"], file)
    ranks = len(rank_folders(file.parent.parent))
    try:
        vocabulary, hidden = tensors[EMBEDDING].shape
        positions = tensors["embedding.position_embeddings.weight"].shape[0]
        inner = tensors[f"{STACK}.layers.0.mlp.linear_fc1.weight"].shape[0]
    except (KeyError, ValueError):
        raise CheckpointError(f"{file}: has neither args nor the tensors that would say what they were") from None
    return {
        "num_layers": layer_counts(tensors)[STACK],
        "hidden_size": hidden,
        # Heads do not show in any shape.
        "num_attention_heads": max(hidden // HEAD_SIZE, 1),
        # fc1 and the vocabulary are cut by rows over the ranks.
        "ffn_hidden_size": inner * ranks,
        "max_position_embeddings": positions,
        "padded_vocab_size": vocabulary * ranks,
        "tensor_model_parallel_size": ranks,
        # On by default in the Megatron-LM that trained them: the tanh form of GELU.
        "bias_gelu_fusion": True,
        "inferred_from_shapes": True,
    }


def _as_core(iteration: Iteration) -> Iteration:
    # Files from before the field have the order of version 0.
    version = float(iteration.common.get("checkpoint_version") or 0)
    if not 0 <= version <= LATEST:
        raise CheckpointError(f"{iteration.folder}: checkpoint_version={version} is not known; it can be 0 to {LATEST}")
    bert = is_bert(entry.name for entry in iteration.weights())
    # Rows are regrouped on each rank before the ranks are put together: every rank has whole heads.
    heads = int(iteration.args.need("num_attention_heads")) // iteration.grid.tp

    def convert(parameter: Parameter) -> Parameter:
        named = replace(parameter, name=rename(parameter.name))
        if version < GROUPED_SINCE and parameter.name.endswith(_QKV):
            # arrange: the optimizer's states lie in the same order as the weights.
            return replace(named, tensor=regrouped(parameter.tensor), arrange=regrouped)
        return named

    def regrouped(piece: Piece) -> Piece:
        return Regrouped(piece, heads, version)

    def rename(name: str) -> str:
        return as_encoder(name) if bert else name

    def converted(file: RankFile) -> RankFile:
        return replace(file, parts=[[convert(parameter) for parameter in part] for part in file.parts])

    return replace(iteration, files=[converted(file) for file in iteration.files])

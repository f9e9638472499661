"""Which parameters a pipeline stage has, in the order in which Megatron's modules make them.

The order decides what the numbers in an optimizer's state and the places in its flat buffers mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mt_ckpt.megatron.names import EMBEDDING, OUTPUT, layer_of
from mt_core.errors import ConfigError

BEFORE_LAYERS = ("embedding.", "encoder_relative_pos_emb.", "decoder_relative_pos_emb.")
EMBEDDINGS = ("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings")
AFTER_LAYERS = ("final_layernorm", "lm_head.dense", "lm_head.layer_norm", "output_layer", "binary_head", "pooler")
LOCAL_LAYER = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "pre_cross_attn_layernorm",
    "cross_attention.linear_proj",
    "cross_attention.linear_q",
    "cross_attention.linear_kv",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2",
    "mlp.shared_experts",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Parts of a layer of Megatron's own modules."""
FUSED_LAYER = (
    "self_attention.linear_proj",
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "pre_cross_attn_layernorm",
    "cross_attention.linear_proj",
    "cross_attention.linear_q",
    "cross_attention.linear_kv",
    "pre_mlp_layernorm",
    *LOCAL_LAYER[LOCAL_LAYER.index("mlp.router") :],
)
"""The same with Transformer Engine, whose linear layers own the norms before them."""


@dataclass(frozen=True)
class Pipeline:
    """stages: processes in a row; parts: runs of layers on each. Part v of stage p is the (v stages + p)-th run."""

    stages: int = 1
    parts: int = 1

    @property
    def runs(self) -> int:
        return self.stages * self.parts

    def run(self, stage: int, part: int) -> int:
        return part * self.stages + stage


def split_layers(parameters: Collection[str], pipeline: Pipeline) -> list[list[str]]:
    """The parameters of each run, in no order: an equal number of layers each. Raises ConfigError when they are not.

    On the last of several runs the matrix that it shares with the first is called as the output's, see `has_copy`.
    """
    stacks = {found[0]: 0 for name in parameters if (found := layer_of(name))}
    for name in parameters:
        if found := layer_of(name):
            stacks[found[0]] = max(stacks[found[0]], found[1] + 1)
    if pipeline.runs > 1 and len(stacks) > 1:
        raise ConfigError(
            f"pipeline_parallel_size={pipeline.stages}: a model of {' and '.join(sorted(stacks))} is not cut into "
            "pipeline stages; it can be 1"
        )
    for count in stacks.values():
        if count % pipeline.runs:
            raise ConfigError(
                f"{count} layers do not divide evenly into {pipeline.stages} pipeline stages x {pipeline.parts} "
                "virtual stages each"
            )
    runs: list[list[str]] = [[] for _ in range(pipeline.runs)]
    for name in parameters:
        runs[_run_of(name, stacks, pipeline.runs)].append(name)
    if has_copy(parameters, pipeline):
        runs[-1].append(OUTPUT)
    return runs


def has_copy(parameters: Collection[str], pipeline: Pipeline) -> bool:
    """Whether the last run keeps a copy of the word vectors, as its output matrix."""
    return pipeline.runs > 1 and EMBEDDING in parameters and OUTPUT not in parameters


def _run_of(name: str, stacks: dict[str, int], runs: int) -> int:
    found = layer_of(name)
    if found is None:
        return 0 if name.startswith(BEFORE_LAYERS) else runs - 1
    return found[1] // (stacks[found[0]] // runs)


def in_order(names: Iterable[str], *, fused: bool) -> list[str]:
    """Canonical names sorted as Megatron's modules list them. fused: norms belong to the linear layers behind them."""
    layer = FUSED_LAYER if fused else LOCAL_LAYER
    return sorted(names, key=lambda name: (_place(name, layer), name.endswith("bias")))


def _place(name: str, layer: Sequence[str]) -> tuple[int, int, int]:
    """(before, in or after a stack of layers; layer; part)"""
    found = layer_of(name)
    if found is not None:
        inner = name.split(".", 3)[3]
        return (_stack_place(name), found[1], _first_match(inner, layer))
    if name.startswith(BEFORE_LAYERS):
        return (0, 0, _first_match(name, EMBEDDINGS))
    if name.startswith(("encoder.", "decoder.")):
        return (_stack_place(name), 1 << 30, 0)
    return (3, 0, _first_match(name, AFTER_LAYERS))


def _stack_place(name: str) -> int:
    return 1 if name.startswith("encoder.") else 2


def _first_match(name: str, prefixes: Sequence[str]) -> int:
    return next((i for i, prefix in enumerate(prefixes) if name.startswith(f"{prefix}.")), len(prefixes))

"""The entries of a rank's file: which parameters stand in it, in which order and under which names.

The order is that in which Megatron's modules create them. It decides what the numbers in an optimizer's state and the
places in its flat buffers mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mt_ckpt.megatron import names
from mt_ckpt.megatron.names import EMBEDDING, EXPERTS, MTP, OUTPUT, Style, layer_of
from mt_core.errors import ConfigError

BEFORE_LAYERS = ("embedding.", "encoder_relative_pos_emb.", "decoder_relative_pos_emb.")
EMBEDDINGS = ("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings")
# The order of construction, not of use: Attention makes core_attention and linear_proj before SelfAttention makes
# linear_qkv.
LAYER = (
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_cross_attn_layernorm",
    "cross_attention.linear_proj",
    "cross_attention.linear_q",
    "cross_attention.linear_kv",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj",
    "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mixer",
    "mixer.in_proj",
    "mixer.conv1d",
    "mixer.norm",
    "mixer.out_proj",
    "norm",
)
"""Modules of a layer."""
PREDICTION = (
    *("enorm", "hnorm", "e_proj", "h_proj", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm"),
)
"""Modules of an MTP depth."""
AFTER_LAYERS = ("lm_head.dense", "lm_head.layer_norm", "output_layer", "binary_head", "pooler.dense")
LEAVES = (
    "conv1d_weight",
    "conv1d_bias",
    "layer_norm_weight",
    "layer_norm_bias",
    "weight",
    "bias",
    "dt_bias",
    "A_log",
    "D",
    "softmax_offset",
)
"""Parameters of a module. The convolution of a mixer is a module of older versions, and two parameters of newer ones.
"""


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

    On the last of several runs the matrix that it shares with the first is called as the output's, see `has_copy`; with
    multi-token prediction, which embeds tokens too, the last run has the token embeddings as such.
    """
    stacks = {layer[0]: 0 for name in parameters if (layer := layer_of(name))}
    for name in parameters:
        if layer := layer_of(name):
            stacks[layer[0]] = max(stacks[layer[0]], layer[1] + 1)
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
    # stages=2, parts=2: runs 0 and 2 are on stage 0, runs 1 and 3 on stage 1.
    runs: list[list[str]] = [[] for _ in range(pipeline.runs)]
    for name in parameters:
        runs[_run_of(name, stacks, pipeline.runs)].append(name)
    if has_copy(parameters, pipeline):
        runs[-1].append(OUTPUT)
    if pipeline.runs > 1 and any(name.startswith(MTP) for name in parameters):
        runs[-1].append(EMBEDDING)
    return runs


def has_copy(parameters: Collection[str], pipeline: Pipeline) -> bool:
    """Whether the last run keeps a copy of the token embeddings, as its LM head."""
    return pipeline.runs > 1 and EMBEDDING in parameters and OUTPUT not in parameters


def _run_of(name: str, stacks: dict[str, int], runs: int) -> int:
    layer = layer_of(name)
    if layer is None:
        # What is neither a layer nor before the layers (norm, head, MTP) is in the last run.
        return 0 if name.startswith(BEFORE_LAYERS) else runs - 1
    return layer[1] // (stacks[layer[0]] // runs)


def in_order(names: Iterable[str], style: Style) -> list[str]:
    """Canonical names sorted as Megatron's modules list what they are in a file."""
    return sorted(names, key=lambda name: _place(style.stored(name)))


Place = tuple[int, int, int, int, int]
"""(before, in or after a stack of layers; layer; module; module within it; parameter)"""


def _place(stored: str) -> Place:
    module, _, leaf = stored.rpartition(".")
    last = _index(leaf, LEAVES)
    if layer := layer_of(stored):
        return (_stack_place(stored), layer[1], _index(_within(module, 3), LAYER), 0, last)
    if stored.startswith(BEFORE_LAYERS):
        return (0, 0, _index(module, EMBEDDINGS), 0, last)
    if stored.startswith(("encoder.", "decoder.")):
        # Behind every layer: final_layernorm.
        return (_stack_place(stored), 1 << 30, 0, 0, last)
    if stored.startswith(MTP):
        depth, *parts = module.split(".")[2:]
        # 3: behind the decoder's final norm, before the head.
        if not parts:  # parameters of the depth itself, before those of its modules
            return (3, int(depth), -1, 0, last)
        return (3, int(depth), _index(parts[0], PREDICTION), _index(_within(module, 4), LAYER), last)
    return (4, 0, _index(module, AFTER_LAYERS), 0, last)


def _stack_place(name: str) -> int:
    return 1 if name.startswith("encoder.") else 2


def _within(module: str, depth: int) -> str:
    """A module's path without the first `depth` parts."""
    return ".".join(module.split(".")[depth:])


def _index(name: str, ordered: Sequence[str]) -> int:
    # Unknown modules last, in the order of their tensors; sorted is stable.
    return ordered.index(name) if name in ordered else len(ordered)


LINEAR = (
    "linear_",
    "in_proj",
    "out_proj",
    "e_proj",
    "h_proj",
    "eh_proj",
    "fc1_latent_proj",
    "fc2_latent_proj",
    "output_layer",
)
"""How the names of linear layers begin."""


@dataclass(frozen=True)
class RankEntry:
    """name: canonical. stored: in the file, the layer numbered within its part. expert: among the rank's."""

    name: str
    stored: str
    expert: int | None


@dataclass(frozen=True)
class Naming:
    """grouped: experts' matrices are `weight0`, `weight1`, ... of one layer."""

    style: Style
    grouped: bool

    def entries(self, parameters: Iterable[str], experts: int) -> Iterator[RankEntry]:
        """Entries of one model part, as Megatron's modules list them. experts: how many of a layer the rank holds."""
        members = in_order(parameters, self.style)
        first = _first_layers(members)
        # Parameters of the experts of one layer, which have to be complete: sequential experts list both matrices of
        # expert 0, then of expert 1. The empty name at the end flushes the last.
        waiting: list[str] = []
        for name in [*members, ""]:
            if waiting and (not name or not _same_experts(name, waiting[0])):
                yield from self._expert_entries(waiting, experts, first)
                waiting = []
            if EXPERTS in name:
                waiting.append(name)
            elif name:
                yield RankEntry(name, names.renumbered(self.style.stored(name), first), None)

    def _expert_entries(self, members: list[str], experts: int, first: dict[str, int]) -> Iterator[RankEntry]:
        # Grouped: weight0, weight1, ... of linear_fc1, then of linear_fc2.
        if self.grouped:
            for name in members:
                for expert in range(experts):
                    yield RankEntry(name, f"{names.renumbered(name, first)}{expert}", expert)
            return
        for expert in range(experts):
            for name in members:
                local = names.renumbered(name, first).replace(EXPERTS, f"{EXPERTS}local_experts.{expert}.")
                yield RankEntry(name, local, expert)


def extra_states(entries: Iterable[RankEntry], heads: Iterable[str]) -> list[str]:
    """Keys that every linear layer has beside its parameters; None is stored under them without FP8. heads: further
    layers, whose parameters may be another's."""
    modules = []
    for entry in entries:
        module, _, leaf = entry.stored.rpartition(".")
        if leaf.startswith(("weight", "bias")) and is_linear(module):
            modules.append(module)
    # dict.fromkeys: without repetitions, in the order of the modules.
    return [f"{module}.{names.EXTRA_STATE}" for module in dict.fromkeys([*modules, *heads])]


def is_linear(module: str) -> bool:
    return module.rpartition(".")[2].startswith(LINEAR)


def _first_layers(members: Iterable[str]) -> dict[str, int]:
    first: dict[str, int] = {}
    for name in members:
        if layer := names.layer_of(name):
            first[layer[0]] = min(first.get(layer[0], layer[1]), layer[1])
    # Negative, so that `renumbered` counts from 0 within the part.
    return {stack: -number for stack, number in first.items()}


def _same_experts(name: str, other: str) -> bool:
    """Whether two parameters are of the experts of one layer."""
    return EXPERTS in name and name.partition(EXPERTS)[0] == other.partition(EXPERTS)[0]

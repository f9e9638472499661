"""The attention core of a context-parallel model: four methods, named as Megatron's `cp_comm_type`. Plugins register
them, and others, with mt_register_context_parallel_methods.

p2p: keys and values go from each rank to those that see them, a block being computed meanwhile.
all_gather: keys and values go to all ranks at once.
a2a: all tokens go to the rank that has the heads (Ulysses), and their results come back.
a2a+p2p: a2a over an inner axis, p2p over an outer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import Tensor

from mt_core.config.checks import divisors
from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionCore, AttentionPattern, sdpa_attention
from mt_core.nn.context_parallel.all_gather import AllGatherAttention
from mt_core.nn.context_parallel.blocks import BlockBackend
from mt_core.nn.context_parallel.masks import SegmentGatherer, shard_pattern
from mt_core.nn.context_parallel.p2p import PointToPointAttention
from mt_core.nn.context_parallel.ulysses import check_heads, ulysses_attention
from mt_core.parallel.context import Axis, Groups

Method = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


def context_parallel_attention(
    method: Method, axes: Sequence[Axis], *, core: AttentionCore = sdpa_attention, backend: BlockBackend = "auto"
) -> AttentionCore:
    """A core for tensors in zig-zag shards: q [B, S / CP, N, D], k and v [B, S / CP, G, D] of this rank's tokens.

    The pattern's segment_ids [B, S / CP] are this rank's too, gathered once per forward. Its causal mask and
    window and ALiBi go by places in the whole sequence. Dropout has to be 0. Build one core and give it to all layers.
    It takes sinks [N] where `core` does; p2p and all_gather, which do without it, always.

    axes: the context-parallel axis; for "a2a+p2p" (inner, outer), see `build_hierarchical_axes`. core: what computes
    whole sequences, for "a2a" and for axes of one process. backend: what computes blocks of keys, for the others.
    Every rank of the axes calls it, in the same order. Raises ConfigError for an unknown method, dropout, or
    (when called) heads that "a2a" cannot divide.
    """
    if method not in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        raise ConfigError(f'parallel.cp_comm_type="{method}" is unknown; it can be p2p, all_gather, a2a or a2a+p2p')
    if method == "a2a+p2p":
        inner, outer = axes
        # The point-to-point core sees the outer rank's chunks in order, as the shards nest (`build_hierarchical_axes`).
        return context_parallel_attention(
            "a2a", [inner], core=context_parallel_attention("p2p", [outer], core=core, backend=backend)
        )
    (axis,) = axes
    if axis.size == 1:
        return core
    attend = ulysses_attention(axis, core) if method == "a2a" else block_attention(method, axis, backend)
    return refusing_the_rest(attend, axis.size)


def build_p2p(axes: Sequence[Axis], core: AttentionCore) -> AttentionCore:
    return context_parallel_attention("p2p", axes, core=core)


def build_all_gather(axes: Sequence[Axis], core: AttentionCore) -> AttentionCore:
    return context_parallel_attention("all_gather", axes, core=core)


def build_a2a(axes: Sequence[Axis], core: AttentionCore) -> AttentionCore:
    return context_parallel_attention("a2a", axes, core=core)


def build_hierarchical(axes: Sequence[Axis], core: AttentionCore) -> AttentionCore:
    return context_parallel_attention("a2a+p2p", axes, core=core)


def check_inner_heads(sizes: Sequence[int], heads: int) -> None:
    """An all-to-all over the (inner) axis gives each of its ranks as many heads."""
    check_heads(heads, sizes[0])


def block_attention(method: Method, axis: Axis, backend: BlockBackend) -> AttentionCore:
    """The methods in which queries stay and keys are sent."""
    gather = SegmentGatherer(axis, lambda shards: shards)  # kept by rank: [CP, B, 2c]
    function = PointToPointAttention if method == "p2p" else AllGatherAttention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, sinks: Tensor | None = None
    ) -> Tensor:
        sharded = shard_pattern(pattern, q, axis, gather)
        # Blocks are computed head by head: [B, heads, 2c, D].
        out: Tensor = function.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sinks, sharded, backend)
        return out.transpose(1, 2)

    return attend


UNSHARDED = {
    "key_padding": "padded keys",
    "bias": "a bias of its own on the scores",
}
"""Fields of AttentionPattern that are not cut into the ranks' shards."""


def refusing_the_rest(core: AttentionCore, size: int) -> AttentionCore:
    def attend(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, *sinks: Tensor) -> Tensor:
        check_dropout(dropout, size)
        check_pattern(pattern)
        return core(q, k, v, pattern, dropout, *sinks)

    return attend


def check_pattern(pattern: AttentionPattern) -> None:
    """Raises ConfigError for what the ranks would compute otherwise than one process does."""
    for name, key in UNSHARDED.items():
        if getattr(pattern, name) is not None:
            raise ConfigError(
                f"attention with {key} cannot be sharded over context-parallel ranks; "
                "set parallel.context_parallel_size to 1"
            )


def check_dropout(dropout: float, size: int) -> None:
    """Raises ConfigError unless dropout is 0."""
    if dropout and size > 1:
        raise ConfigError(
            f"model.attention_dropout={dropout:g} cannot be had with parallel.context_parallel_size={size}: which "
            "weights are dropped is drawn inside the attention of one block of keys, so the ranks would drop others "
            "than one process does, and others in each layout; set model.attention_dropout to 0"
        )


# -- two axes in place of one: all-to-all within an inner axis, point to point over an outer one -----------
#
# The ranks of a context-parallel axis of size inner * outer are numbered with the inner axis fastest:
# rank = outer_rank * inner + inner_rank, so that inner neighbours can be processes of one machine. The zig-zag
# shards of the whole axis nest: those of the inner ranks, put in order, are the outer rank's two chunks.
#
#     inner 2, outer 2    chunk        0  1  2  3  4  5  6  7
#                         rank         0  1  2  3  3  2  1  0
#                         outer rank   0  0  1  1  1  1  0  0

Members = list[tuple[int, ...]]


def check_hierarchy(sizes: tuple[int, ...], size: int) -> None:
    """Raises ConfigError unless sizes are (inner, outer) with the product `size`."""
    if len(sizes) == 2 and sizes[0] * sizes[1] == size:
        return
    legal = ", ".join(f"[{inner}, {size // inner}]" for inner in divisors(size))
    raise ConfigError(
        f"parallel.hierarchical_context_parallel_sizes={list(sizes)}: [ranks of an all-to-all, ranks of a "
        f"point-to-point round] have to have the product parallel.context_parallel_size={size}; they can be {legal}"
    )


def hierarchical_members(axes: Iterable[tuple[int, ...]], inner: int) -> tuple[Members, Members]:
    """Members of each context-parallel axis of the world -> those of the inner and of the outer axes."""
    inner_axes: Members = []
    outer_axes: Members = []
    for ranks in axes:
        # Neighbours are an inner axis, ranks at a distance of `inner` an outer one.
        inner_axes += [ranks[start : start + inner] for start in range(0, len(ranks), inner)]
        outer_axes += [ranks[start::inner] for start in range(inner)]
    return inner_axes, outer_axes


def build_hierarchical_axes(axes: Iterable[tuple[int, ...]], sizes: tuple[int, ...]) -> tuple[Axis, Axis]:
    """(inner, outer) axis of this process. `axes`: as from `axis_members(...)["cp"]`.

    Collective over the world. Raises ConfigError when sizes do not fit.
    """
    listed_axes = list(axes)
    check_hierarchy(sizes, len(listed_axes[0]))
    inner, outer = hierarchical_members(listed_axes, sizes[0])
    groups = Groups()
    return groups.axis(inner), groups.axis(outer)

"""Two axes in place of one: all-to-all within an inner axis, point to point over an outer one.

The ranks of a context-parallel axis of size inner * outer are numbered with the inner axis fastest:
rank = outer_rank * inner + inner_rank, so that inner neighbours can be processes of one machine. The zig-zag
shards of the whole axis nest: those of the inner ranks, put in order, are the outer rank's two chunks.

    inner 2, outer 2    chunk        0  1  2  3  4  5  6  7
                        rank         0  1  2  3  3  2  1  0
                        outer rank   0  0  1  1  1  1  0  0
"""

from __future__ import annotations

from collections.abc import Iterable

from mt_core.config.checks import divisors
from mt_core.errors import ConfigError
from mt_core.parallel.context import Axis, Groups

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

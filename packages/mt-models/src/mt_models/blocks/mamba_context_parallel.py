"""The scan of a Mamba-2 mixer over sequences sharded over context-parallel ranks, as in Megatron.

A recurrence needs its positions in order, so an all-to-all exchanges positions for heads: each rank scans the whole
sequence for its share of the heads, and a second all-to-all sends the results back (as in Ulysses, see
mt_core.nn.context_parallel.ulysses). Groups that are not divisible by the ranks are repeated. Each rank's gradient of
the weights of its heads is complete, and zero for the others: the sum over ranks, which data parallelism takes anyway,
equals that of one process.
"""

from __future__ import annotations

from torch import Tensor

from mt_core.nn.context_parallel.masks import SegmentGatherer
from mt_core.nn.context_parallel.ulysses import group_repeats, to_heads, to_tokens
from mt_core.nn.context_parallel.zigzag import in_order
from mt_core.parallel.context import Axis
from mt_models.blocks.mamba_scan import MambaScan, ScanInputs, ScanWeights


class ContextParallelScan:
    """A MambaScan for tensors in zig-zag shards. Collective: every rank of the axis calls it, in the same order."""

    def __init__(self, scan: MambaScan, axis: Axis) -> None:
        self.scan, self.axis = scan, axis
        # [CP, B, S / CP] of all ranks -> [B, CP, S / CP] -> [B, S]; in_order
        # then undoes the zig-zag order of the chunks.
        self.gather_segments = SegmentGatherer(
            axis, lambda shards: in_order(shards.movedim(0, 1).flatten(1, 2), 1, axis.size)
        )

    def __call__(self, inputs: ScanInputs, weights: ScanWeights, segment_ids: Tensor | None = None) -> Tensor:
        """Inputs [B, S / CP, ...] of all heads of a tensor-parallel rank, and their weights -> [B, S / CP, H, P]"""
        # A rank needs the b and c of its own heads. CP = 4 and G = 2: each group
        # is repeated twice, so that 4 can be sharded.
        repeats = group_repeats(inputs.x.shape[2], inputs.b.shape[2], self.axis.size)
        b, c = (group.repeat_interleave(repeats, dim=2) for group in (inputs.b, inputs.c))
        # One all-to-all for all four. dt gets a channel dimension of 1, since
        # the exchange moves [B, S, heads, channels].
        x, b, c, dt = to_heads((inputs.x, b, c, inputs.dt[..., None]), self.axis)
        own = own_weights(weights, repeats, self.axis)
        y = self.scan(ScanInputs(x, b, c, dt.squeeze(-1)), own, self.gather_segments(segment_ids))
        return to_tokens(y, self.axis)


def own_weights(weights: ScanWeights, repeats: int, axis: Axis) -> ScanWeights:
    """The heads that this rank scans, and their groups."""

    # Views of the parameters. Contiguous shares, in the order in which to_heads gives heads to ranks.
    def of_heads(x: Tensor) -> Tensor:
        return x.chunk(axis.size)[axis.rank]

    def of_groups(x: Tensor) -> Tensor:
        return of_heads(x.repeat_interleave(repeats, dim=0))

    def of_parts(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, b, c = parts
        return of_heads(x), of_groups(b), of_groups(c)

    return ScanWeights(
        of_parts(weights.conv),
        None if weights.conv_bias is None else of_parts(weights.conv_bias),
        of_heads(weights.A_log),
        of_heads(weights.D),
        of_heads(weights.dt_bias),
    )

"""Offsets of parameters in the flat buffers of Megatron's distributed optimizer.

A model part keeps its parameters in one buffer, in the reverse of the order in which they were made, each beginning at
a multiple of 64 elements. The buffer is cut into buckets, which end at a multiple of 128 and of the data-parallel size.
What is stored is the buckets one after another without the padding at their ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.names import EMBEDDING, OUTPUT

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
HIGH_BANDWIDTH_ALIGNMENT = 1 << 16


@dataclass(frozen=True)
class Bucketing:
    """size: elements after which a bucket is closed; None: one bucket. alignment: of the buckets' ends."""

    size: int | None
    alignment: int


@dataclass(frozen=True)
class FlatParameter:
    """alone: it has its own bucket, as a matrix that two pipeline stages share."""

    name: str
    numel: int
    alone: bool = False


@dataclass(frozen=True)
class Bucket:
    """first: of each of its parameters, in elements from the beginning of the bucket. numel: without padding."""

    first: dict[str, int]
    numel: int


def bucketing(args: Arguments, stage: int, part: int, *, of_experts: bool = False) -> Bucketing:
    """How the run cut the buffer of part `part` of pipeline stage `stage`. of_experts: the one that the experts have
    for themselves.

    Only the very first part has several buckets, and only when gradients are reduced while others are computed.
    """
    # Megatron shards the optimizer over data and context parallel ranks together.
    data_parallel = int(args.get("data_parallel_size", 1)) * int(args.get("context_parallel_size", 1))
    alignment = math.lcm(BUCKET_ALIGNMENT, _expert_data_parallel(args, data_parallel) if of_experts else data_parallel)
    if args.get("ddp_pad_buckets_for_high_nccl_busbw", False):
        alignment = math.lcm(alignment, HIGH_BANDWIDTH_ALIGNMENT)
    # Megatron uses one bucket without overlap, on later pipeline stages, whose reductions are not on the critical path,
    # and on later virtual stages (`disable_bucketing`).
    several = args.get("overlap_grad_reduce", False) and stage == 0 and part == 0
    # Default of --ddp-bucket-size, in elements: larger for many ranks, so that the chunks of a ring reduction stay
    # bandwidth-bound.
    default = max(40_000_000, 1_000_000 * data_parallel)
    return Bucketing(int(args.get("ddp_bucket_size", default)) if several else None, alignment)


def _expert_data_parallel(args: Arguments, data_parallel: int) -> int:
    """Ranks that hold the same experts."""
    return max(1, data_parallel * args.tensor_parallel // (args.expert_tensor_parallel * args.expert_parallel))


def shared_matrices(args: Arguments) -> frozenset[str]:
    """The parameters that the first and the last pipeline stage both have, each in a separate bucket: tied matrices,
    and with multi-token prediction, for which the last stage embeds tokens, the token embeddings."""
    if args.pipeline_parallel == 1:
        return frozenset()
    predicts = bool(args.get("mtp_num_layers", 0))
    return frozenset(({EMBEDDING} if predicts else set()) | (set() if args.untied else {EMBEDDING, OUTPUT}))


def buckets_of(parameters: Sequence[FlatParameter], cut: Bucketing) -> list[Bucket]:
    """The buckets of parameters given in the order in which they were made."""
    buckets: list[Bucket] = []
    first: dict[str, int] = {}
    begin = end = 0

    def close() -> None:
        nonlocal first, begin, end
        buckets.append(Bucket(first, end - begin))
        begin = end = _up(end, cut.alignment)
        first = {}

    # Gradients are ready in the reverse order of creation, so that the first bucket is complete first.
    # a (100 elements), b (10), alignment 128: b at 0, a at 64; the bucket has 164 elements, padded 256.
    for parameter in reversed(parameters):
        start = _up(end, PARAMETER_ALIGNMENT)
        if parameter.alone and first:
            close()
            # Alone: the bucket before it is closed, and its padding counts before this one begins.
            start = end
        first[parameter.name] = start - begin
        end = start + parameter.numel
        if parameter.alone or (cut.size is not None and end - begin >= cut.size):
            close()
    if first:
        close()
    return buckets


def padded_numel(bucket: Bucket, cut: Bucketing) -> int:
    """With the padding at its end."""
    return _up(bucket.numel, cut.alignment)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

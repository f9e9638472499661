"""Every tensor that a rank of the distributed optimizer updates begins at a multiple of 16 bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mt_core.optim.buckets import Bucket, ShardAndReplicateAxes
from mt_core.optim.param_and_grad_buffer import BufferOptions, ParamShard, shard_params
from mt_core.parallel.context import Axis

SIZES = (768, 2, 31, 5000, 1, 2304, 7)
"""Elements of parameters; BERT's binary head has a bias of two."""


def shards_of_ranks(ranks: int, dtype: torch.dtype, remainders: bool) -> Iterator[list[ParamShard]]:
    for rank in range(ranks):
        axes = ShardAndReplicateAxes(Axis(ranks, rank, None, tuple(range(ranks))))
        named = [(str(i), nn.Parameter(torch.ones(size, dtype=dtype))) for i, size in enumerate(SIZES)]
        bucket = Bucket(named, axes, gradient_dtype=torch.float32, reduce_dtype=torch.float32, sharded=True)
        options = BufferOptions(sharded=True, keeps_remainders=remainders)
        yield [shard for shard in shard_params(bucket, options) if shard.last > shard.first]


@pytest.mark.parametrize("ranks", [1, 3, 7, 8])
@pytest.mark.parametrize(
    ("dtype", "remainders"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_parts_of_parameters_begin_at_16_bytes(ranks: int, dtype: torch.dtype, remainders: bool) -> None:
    updated = dict.fromkeys(map(str, range(len(SIZES))), 0)
    for shards in shards_of_ranks(ranks, dtype, remainders):
        for shard in shards:
            gradient = shard.bucket.gradients[shard.slot.start + shard.first :]
            model = shard.bucket.weights[shard.slot.start + shard.first :]
            assert [x.data_ptr() % 16 for x in (shard.main, gradient, model)] == [0, 0, 0], (shard.first, shard.last)
            updated[shard.slot.name] += shard.last - shard.first
    # Each element is updated by one rank.
    assert tuple(updated.values()) == SIZES


def test_sizes_of_parts_are_odd_only_where_a_parameter_ends() -> None:
    """Sizes of 8 are what accesses of 16 bytes need: a rank that has the middle of a parameter always has one."""
    for shards in shards_of_ranks(7, torch.float32, remainders=False):
        for shard in shards:
            ends = shard.last == shard.slot.parameter.numel()
            assert ends or (shard.last - shard.first) % 8 == 0

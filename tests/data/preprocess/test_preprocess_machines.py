"""Which part of the corpus a machine does."""

from __future__ import annotations

import pytest

from mt_core.errors import ConfigError
from mt_data.preprocess.options import machine_share
from mt_data.preprocess.parts import Shard
from mt_data.preprocess.plan import Job, share_of_machine

SLURM = {
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_STEP": "2",
}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("shard", "partitions", "environment", "expected"),
    [
        (None, None, {}, (0, 1)),
        ("1/4", None, {}, (1, 4)),
        ("1", 4, {}, (1, 4)),
        ("1/4", None, SLURM | TORCHRUN, (1, 4)),
        (None, None, SLURM, (3, 4)),
        (None, 4, SLURM, (3, 4)),
        (None, None, {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "1"}, (0, 1)),
        (None, None, TORCHRUN, (2, 8)),
        ("0/1", None, TORCHRUN, (0, 1)),
        (None, None, {"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        (None, 3, {}, (0, 1)),
    ],
)
def test_share(shard: str | None, partitions: int | None, environment: dict[str, str], expected: tuple) -> None:
    share = machine_share(shard, partitions, environment)
    assert (share.index, share.count) == expected


@pytest.mark.parametrize(
    ("shard", "partitions", "environment", "words"),
    [
        ("4/4", None, {}, "part 4 of 4 is none"),
        ("1/0", None, {}, "part 1 of 0"),
        ("1", None, {}, "expected i/n"),
        ("a/b", None, {}, "expected i/n"),
        ("1/4", 5, {}, "--partitions 5, but --shard 1/4 says 4"),
        (None, 5, TORCHRUN, "--partitions 5, but RANK=2, WORLD_SIZE=8 says 8"),
        (None, None, SLURM | TORCHRUN, "both name a part"),
        (None, None, {"SLURM_ARRAY_TASK_ID": "6", **SLURM, "SLURM_ARRAY_TASK_MIN": "0"}, "no member"),
        (None, None, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is no number"),
    ],
)
def test_share_that_cannot_be(
    shard: str | None, partitions: int | None, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        machine_share(shard, partitions, environment)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_shares_are_neighbours_and_cover_everything(count: int) -> None:
    jobs: list[Job] = [Shard((number, 0), (), size) for number, size in enumerate([5, 0, 300, 7, 7, 7, 90, 1])]
    shares = [share_of_machine(jobs, index, count) for index in range(count)]
    assert [job for share in shares for job in share] == jobs

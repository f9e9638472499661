"""Which part of a corpus this process does, when many machines share the work."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mt_core.errors import ConfigError


@dataclass(frozen=True)
class MachineShare:
    """Part `index` (from 0) of `count`; `origin` says who decided."""

    index: int
    count: int
    origin: str

    @property
    def suffix(self) -> str:
        """Behind the output prefix; sorts in the order of the parts. Empty for the whole corpus."""
        return "" if self.count == 1 else f"_{self._padded(self.index)}-of-{self._padded(self.count)}"

    @property
    def all_suffixes(self) -> str:
        """The suffixes of all parts, in order, as bash and zsh expand it."""
        first, last = self._padded(0), self._padded(self.count - 1)
        return f"_{{{first}..{last}}}-of-{self._padded(self.count)}"

    def _padded(self, number: int) -> str:
        # At least five digits, so that names sort in the order of the parts up to 99999 machines.
        return f"{number:0{max(5, len(str(self.count)))}d}"


WHOLE = MachineShare(0, 1, "the whole corpus")


def machine_share(
    shard: str | None, partitions: int | None, environment: Mapping[str, str] | None = None
) -> MachineShare:
    """The share that `--shard` names, else the one that a SLURM array or torchrun gives, else all.

    Raises ConfigError for a shard that cannot be, and where SLURM and torchrun both give one.
    """
    environment = os.environ if environment is None else environment
    share = _from_option(shard, partitions) if shard is not None else _from_environment(environment)
    if not 0 <= share.index < share.count:
        raise ConfigError(f"{share.origin}: part {share.index} of {share.count} is none; parts count from 0")
    if partitions is not None and share is not WHOLE and share.count != partitions:
        raise ConfigError(f"--partitions {partitions}, but {share.origin} says {share.count} parts")
    return share


def _from_option(shard: str, partitions: int | None) -> MachineShare:
    found = re.fullmatch(r"(\d+)(?:/(\d+))?", shard)
    if not found or (found[2] is None and partitions is None):
        raise ConfigError(f"--shard {shard}: expected i/n, such as 0/4, or i together with --partitions n")
    count = int(found[2]) if found[2] is not None else partitions
    return MachineShare(int(found[1]), count or 0, f"--shard {shard}")


def _from_environment(environment: Mapping[str, str]) -> MachineShare:
    # Both may be set: torchrun started inside of a SLURM array job. Which of the two divides the corpus cannot be
    # guessed.
    shares = [share for share in (_from_slurm(environment), _from_torchrun(environment)) if share.count > 1]
    if len(shares) > 1:
        raise ConfigError(
            f"{shares[0].origin} and {shares[1].origin} both name a part; say which with --shard i/n (0/1 for all)"
        )
    return shares[0] if shares else WHOLE


def _from_slurm(environment: Mapping[str, str]) -> MachineShare:
    count = _number(environment, "SLURM_ARRAY_TASK_COUNT", 1)
    if "SLURM_ARRAY_TASK_ID" not in environment or count == 1:
        return WHOLE
    # --array=5-20:5 gives the ids 5, 10, 15, 20 with MIN 5 and STEP 5: index = (id - MIN) / STEP. TASK_COUNT counts the
    # members, so arrays with gaps (0,3,4) fail the check below.
    task, first, step = (
        _number(environment, name, default)
        for name, default in (
            ("SLURM_ARRAY_TASK_ID", 0),
            ("SLURM_ARRAY_TASK_MIN", 0),
            ("SLURM_ARRAY_TASK_STEP", 1),
        )
    )
    index, rest = divmod(task - first, max(step, 1))
    if rest or index >= count:
        raise ConfigError(
            f"SLURM_ARRAY_TASK_ID={task} is no member of an even array of {count} from {first}; "
            "number the array 0-N, or give --shard i/n"
        )
    return MachineShare(index, count, f"SLURM_ARRAY_TASK_ID={task}")


def _from_torchrun(environment: Mapping[str, str]) -> MachineShare:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return WHOLE
    rank, world = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    return MachineShare(rank, world, f"RANK={rank}, WORLD_SIZE={world}")


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no number; give --shard i/n") from None

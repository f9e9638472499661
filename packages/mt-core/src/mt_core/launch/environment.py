"""Rank and world size of this process, from the variables that torchrun, srun or `mt ... --nproc` set."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mt_core.errors import ConfigError

# -- the variables that Slurm sets for the tasks of a job step (`srun`) -----------------------------------

STEP = "SLURM_STEP_ID"
"""Set by srun in each task. A batch script has most other Slurm variables too, but is not a task of a step."""
RANK = "SLURM_PROCID"
WORLD_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
LOCAL_RANK = "SLURM_LOCALID"
NODE = "SLURM_NODEID"
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
JOB = "SLURM_JOB_ID"

FIRST_PORT, PORTS = 12000, 20000
"""Ports derived from the job id are in [12000, 32000), below Linux's ephemeral ports."""


def first_of(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The first of the names that is set."""
    return next((name for name in names if environ.get(name)), None)


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task that srun started."""
    return STEP in environ and RANK in environ


def has_several_tasks(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks that srun started."""
    name = first_of(environ, WORLD_SIZE)
    return is_step(environ) and name is not None and environ[name] != "1"


def expand_node_list(text: str) -> list[str]:
    """ "node[01-03,07],login" -> node01, node02, node03, node07, login. Raises ConfigError when it is malformed."""
    # After removal of the complete sets no bracket may be left.
    if re.search(r"[\[\]]", re.sub(r"\[[^\[\]]+\]", "", text)) or not text.strip():
        raise ConfigError(f"the list of nodes {text!r} is malformed; expected a form such as node[01-03,07],other")
    # Commas outside of brackets: those that no ] follows before the next [.
    parts = re.split(r",(?![^\[]*\])", text)
    return [name for part in parts for name in _expand(part.strip(), text)]


def _expand(part: str, whole: str) -> list[str]:
    """One name with any number of bracketed sets."""
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, numbers, after = match.groups()
    # Several sets in one name: rack[1-2]node[01-02].
    tails = _expand(after, whole)
    return [
        f"{before}{number}{tail}" for item in numbers.split(",") for number in _range(item, whole) for tail in tails
    ]


def _range(item: str, whole: str) -> list[str]:
    """ "01-03" -> 01, 02, 03: zeros in front are kept."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise ConfigError(f"the list of nodes {whole!r} has {item!r} in brackets; expected a number or a range 01-03")
    first, last = match[1], match[2] or match[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def expand_tasks_per_node(text: str) -> list[int]:
    """ "2(x3),1" -> 2, 2, 2, 1."""
    counts = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ConfigError(f"the number of tasks on each node is {text!r}; expected a form such as 8(x3),4")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def default_port(environ: Mapping[str, str]) -> int:
    """A port derived from the ids of job and step: the same for all tasks of a step, different between steps."""
    numbers = [int(environ[name]) for name in (JOB, STEP) if environ.get(name, "").isdigit()]
    return FIRST_PORT + sum(numbers) % PORTS


Launcher = Literal["none", "mt", "torchrun", "slurm", "variables"]

LAUNCHED_BY_MT = "MT_LAUNCH_DIR"
"""Set by `mt_core.launch.local`: the folder in which ranks leave `errors/` and `logs/`."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
TORCHELASTIC = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class RankEnvironment:
    """Rank, world size and rendezvous address of this process. The default is a single process without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: Launcher = "none"
    launcher_has_store: bool = False
    """Whether a launcher serves the store at master_addr:master_port; else rank 0 does."""
    attempt: int = 0

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def serves_store(self) -> bool:
        return self.rank == 0 and not self.launcher_has_store

    def variables(self) -> dict[str, str]:
        """The same values as torchrun's environment variables."""
        names = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in names.items() if value is not None}


def read_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """The environment from torchrun's variables, else from Slurm's, else of a single process.

    Raises ConfigError, which names the variable, when one is missing, is no number, is out of range or
    contradicts another.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_variables(environ)
    if is_step(environ):
        return _from_slurm(environ)
    return RankEnvironment()


def _from_variables(environ: Mapping[str, str]) -> RankEnvironment:
    world_size = _number(environ, "WORLD_SIZE", minimum=1)
    # WORLD_SIZE=1 alone is enough for a single process.
    rank = _number(environ, "RANK", below=("WORLD_SIZE", world_size), default=0 if world_size == 1 else None)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", minimum=1, default=world_size)
    if local_world_size > world_size:
        raise ConfigError(f"LOCAL_WORLD_SIZE={local_world_size} is more than WORLD_SIZE={world_size}")
    local_rank = _number(environ, "LOCAL_RANK", below=("LOCAL_WORLD_SIZE", local_world_size), default=rank)
    launcher = _launcher(environ)
    if launcher == "slurm":
        _require_slurm_agrees(environ, rank, world_size)
    # "65536" as the name of the bound: _number prints a number as it is.
    port = _number(environ, "MASTER_PORT", minimum=1, below=("65536", 65536)) if world_size > 1 else None
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=_required(environ, "MASTER_ADDR") if world_size > 1 else None,
        master_port=port,
        launcher=launcher,
        # torchrun's agent and mt's launcher serve the store in their own process.
        launcher_has_store=environ.get(AGENT_STORE) == "True",
        attempt=_number(environ, ATTEMPT, default=0),
    )


def _launcher(environ: Mapping[str, str]) -> Launcher:
    if LAUNCHED_BY_MT in environ:
        return "mt"
    if TORCHELASTIC in environ:
        return "torchrun"
    return "slurm" if has_several_tasks(environ) else "variables"


def _require_slurm_agrees(environ: Mapping[str, str], rank: int, world_size: int) -> None:
    """A RANK exported in a batch script is the same in every task: raise ConfigError when it contradicts Slurm."""
    size_name = first_of(environ, WORLD_SIZE) or WORLD_SIZE[-1]
    for name, value, slurm_name in [("WORLD_SIZE", world_size, size_name), ("RANK", rank, RANK)]:
        if _number(environ, slurm_name) != value:
            raise ConfigError(
                f"{name}={value} contradicts {slurm_name}={environ[slurm_name]}, which srun set; "
                f"unset RANK and WORLD_SIZE to take srun's"
            )


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    size_name = first_of(environ, WORLD_SIZE) or WORLD_SIZE[-1]
    world_size = _number(environ, size_name, minimum=1)
    rank = _number(environ, RANK, below=(size_name, world_size))
    local_world_size = _slurm_local_world_size(environ, size_name, world_size)
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, LOCAL_RANK, below=("tasks on this node", local_world_size)),
        local_world_size=local_world_size,
        master_addr=_slurm_master(environ) if world_size > 1 else None,
        master_port=_number(environ, "MASTER_PORT", minimum=1, default=default_port(environ)),
        launcher="slurm",
    )


def _slurm_local_world_size(environ: Mapping[str, str], size_name: str, world_size: int) -> int:
    name = first_of(environ, TASKS_PER_NODE)
    if name is None:
        return world_size
    counts = expand_tasks_per_node(environ[name])
    if sum(counts) != world_size:
        raise ConfigError(f"{name}={environ[name]} is {sum(counts)} tasks, but {size_name}={world_size}")
    return counts[_number(environ, NODE, below=(f"nodes in {name}", len(counts)), default=0)]


def _slurm_master(environ: Mapping[str, str]) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    name = first_of(environ, NODE_LIST)
    if name is None:
        raise ConfigError("SLURM_NODELIST is not set, so the node of rank 0 is unknown; set MASTER_ADDR to it")
    return expand_node_list(environ[name])[0]


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        present = [other for other in ("RANK", "WORLD_SIZE") if other in environ]
        also = f" although {' and '.join(present)} {'is' if len(present) == 1 else 'are'}" if present else ""
        raise ConfigError(f"{name} is not set{also}; start with mt train --nproc N, torchrun or srun, or unset these")
    return value


def _number(
    environ: Mapping[str, str],
    name: str,
    *,
    minimum: int = 0,
    below: tuple[str, int] | None = None,
    default: int | None = None,
) -> int:
    """A whole number in [minimum, below). Raises ConfigError that names the variable."""
    if default is not None and not environ.get(name):
        return default
    text = _required(environ, name)
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"{name}={text!r} is no whole number of at least {minimum}")
    if below is not None and int(text) >= below[1]:
        bound = below[0] if below[0].isdecimal() else f"{below[0]} ({below[1]})"
        raise ConfigError(f"{name}={text} is not below {bound}")
    return int(text)

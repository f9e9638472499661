"""The environment variables that Slurm sets for the tasks of a job step (`srun`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mt_core.errors import ConfigError

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

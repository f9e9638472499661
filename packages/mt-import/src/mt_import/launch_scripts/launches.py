"""The training that a launch script starts: script, arguments, processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mt_core.errors import ConfigError
from mt_import.launch_scripts.reading import Command, ReadScript, read_script
from mt_import.launch_scripts.variables import MARK, Unknowns, Value, is_known

PROCESSES = ("nproc-per-node", "ntasks-per-node", "gpus-per-node")
NODES = ("nnodes", "nodes", "N", "num-machines")
TOTAL = ("ntasks", "n", "num-processes")
NODE_RANK = ("node-rank", "machine-rank")
ADDRESS = ("master-addr", "main-process-ip")
PORT = ("master-port", "main-process-port")
BATCH = "#SBATCH "
SIZE_OPTION = "--num-layers"
"""The argument that every model has."""


@dataclass(frozen=True)
class Launch:
    """script: the Python file. arguments: its words; values that are not known are marks. nproc: processes of a node.

    Numbers and addresses that the script does not decide are None.
    """

    script: str
    arguments: list[str]
    nproc: int | None = None
    nnodes: int | None = None
    node_rank: str | None = None
    master_addr: str | None = None
    master_port: str | None = None
    line: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int | None:
        return self.nproc * self.nnodes if self.nproc is not None and self.nnodes is not None else None


@dataclass(frozen=True)
class ArgumentList:
    """Arguments that a file assigns to variables and starts nothing with. names: the variables."""

    names: tuple[str, ...]
    arguments: list[str]


def read_launch(
    path: Path,
    define: Mapping[str, str],
    arguments: Sequence[str],
    known_scripts: Sequence[str],
    program: str | None = None,
) -> tuple[Launch | ArgumentList, Unknowns]:
    """The one launch of a script that is not of a tool, or the arguments of a file that only assigns them.

    known_scripts: names of training scripts, which are preferred. program: the one that is meant, of several: the end
    of its path, or the line of its command.

    Raises ConfigError when there is none, or several, or a condition that the text does not decide leads to it.
    """
    read = read_script(path, define, arguments)
    if not read.commands and program is None and (argument_list := _argument_list(read.values)) is not None:
        return argument_list, read.unknowns
    command = _the_command(path, read, known_scripts, program)
    if command.undecided is not None and program is None:
        raise ConfigError(
            f"{path}, line {command.line}: whether this command runs is decided by {command.undecided}; give --define "
            f"for the variable that it needs, or --program {command.line}"
        )
    return launch_of(command, read.unknowns, _batch_options(path)), read.unknowns


def _batch_options(path: Path) -> dict[str, str]:
    """What the #SBATCH lines before the first command of a script request."""
    options: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(BATCH):
            options |= _options(line.removeprefix(BATCH).partition(" #")[0].split())
        elif line.strip() and not line.startswith("#"):
            break
    return options


def _argument_list(values: Mapping[str, Value]) -> ArgumentList | None:
    """The variables that hold arguments of a model. One whose words another one repeats is left out."""
    variables = {name: _words_of(value) for name, value in values.items()}
    options = {
        name: words
        for name, words in variables.items()
        if words and (words[0].startswith("--") or MARK.match(words[0]))
    }
    if not any(SIZE_OPTION in words for words in options.values()):
        return None
    whole = {
        name: words
        for name, words in options.items()
        if not any(_contains(other, words) and other != words for other in options.values())
    }
    return ArgumentList(tuple(whole), [word for words in whole.values() for word in words])


def _words_of(value: Value) -> list[str]:
    return list(value) if isinstance(value, list) else value.split()


def _contains(words: Sequence[str], part: Sequence[str]) -> bool:
    size = len(part)
    return any(list(words[at : at + size]) == list(part) for at in range(len(words) - size + 1))


def _named(command: Command, program: str) -> bool:
    return program == str(command.line) or f"/{_script(command)}".endswith(f"/{program}")


def _the_command(path: Path, read: ReadScript, known_scripts: Sequence[str], program: str | None) -> Command:
    if program is not None:
        return _the_named_command(path, read, program)
    known = [command for command in read.commands if _script(command).rpartition("/")[2] in known_scripts]
    chosen = known or read.commands
    if not chosen:
        ended = f"; it ends with the exit in line {read.ended}" if read.ended is not None else ""
        raise ConfigError(f"{path} starts no Python script that ends in .py{ended}")
    if len(chosen) > 1:
        raise ConfigError(
            f"{path} starts {len(chosen)} programs: {_listed(chosen)}; name one of them by --program, by the end of "
            "its path or by its line"
        )
    return chosen[0]


def _the_named_command(path: Path, read: ReadScript, program: str) -> Command:
    chosen = [command for command in read.commands if _named(command, program)]
    if len(chosen) == 1:
        return chosen[0]
    which = "is the name of several" if chosen else "is none of them"
    raise ConfigError(
        f"--program {program} {which}: {path} starts {_listed(chosen or read.commands) or 'no program'}; a line names "
        "one of them"
    )


def _listed(commands: Sequence[Command]) -> str:
    return ", ".join(f"{_script(command)} in line {command.line}" for command in commands)


def _script(command: Command) -> str:
    return next(word for word in command.words if word.endswith(".py"))


def launch_of(command: Command, unknowns: Unknowns, batch: Mapping[str, str] | None = None) -> Launch:
    """batch: options of the job, which srun takes for those that it is not given."""
    place = command.words.index(_script(command))
    options = _options(command.words[:place])
    if "srun" in command.words[:place] and PROCESSES[0] not in options:
        options = {**(batch or {}), **options}
    environment = command.environment
    nnodes = _integer(_first(options, NODES))
    # srun and accelerate give the processes of all nodes.
    total = _integer(_first(options, TOTAL)) or _integer(environment.get("WORLD_SIZE"))
    nproc = _integer(_first(options, PROCESSES))
    # Not given: one node. Given by a value that is not known: None.
    if nnodes is None and not _first(options, NODES):
        nnodes = 1
    if nproc is None and total is not None and nnodes:
        nproc = total // nnodes
    if nproc is None and not _first(options, PROCESSES) and total is None:
        nproc = 1
    rank, address, port = (_readable(_first(options, names), unknowns) for names in (NODE_RANK, ADDRESS, PORT))
    return Launch(
        command.words[place],
        command.words[place + 1 :],
        nproc,
        nnodes,
        node_rank=rank,
        master_addr=address,
        master_port=port,
        line=command.line,
        environment=environment,
    )


def _options(words: Sequence[str]) -> dict[str, str]:
    """--a-b c, --a_b=c and -N 2 of a launcher, with hyphens."""
    options: dict[str, str] = {}
    for place, word in enumerate(words):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            # Without its parser it is not known which options take a value: the next word is kept for each.
            follows = words[place + 1] if place + 1 < len(words) else ""
            options[name.replace("_", "-")] = value if equals else follows
    return options


def _first(options: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((options[name] for name in names if name in options), None)


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _readable(text: str | None, unknowns: Unknowns) -> str | None:
    return unknowns.readable(text) if text is not None and is_known(text) else None

"""Megatron-LM's arguments: from a launch script, a list of words, or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.config.checks import MODEL_AXES
from mt_core.errors import ConfigError, Problems
from mt_core.plugins import PluginHost
from mt_import.launch_scripts.launches import ArgumentList, Launch, read_launch
from mt_import.launch_scripts.variables import Unknowns, is_known
from mt_import.megatron_arguments.command_line import ParsedArgument, parse_arguments
from mt_import.megatron_arguments.entry_scripts import (
    ENTRY_SCRIPTS,
    EntryScript,
    absent_entry,
    entry_of_file,
    entry_script,
)
from mt_import.megatron_arguments.table import Version, by_dest, by_option
from mt_import.megatron_arguments.translation import Translation, translate
from mt_import.result import ImportResult, Processes, result_of

DEFAULT_ENTRY = "gpt"
HYBRID_OPTIONS = ("--hybrid-override-pattern", "--hybrid-layer-pattern", "--is-hybrid-model")
ENVIRONMENT: Mapping[str, str] = {
    "NCCL_ALGO": "NCCL reads it under mt train, too, and train.deterministic says whether it fixes the order of sums",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "train.deterministic picks kernels by itself, and attention of "
    "Transformer Engine, which reads it, is none of them",
}
"""Variables that Megatron's deterministic mode reads, and what becomes of them."""


@dataclass(frozen=True)
class MegatronOptions:
    """entry: name of a kind of model; None: the script's. version: None: by the arguments. world_size: None: the
    script's. program: of a script that starts several, the end of the path of the one that is meant, or its line."""

    entry: str | None = None
    version: Version | None = None
    world_size: int | None = None
    program: str | None = None


def import_words(words: Sequence[str], host: PluginHost, options: MegatronOptions | None = None) -> ImportResult:
    """A list of arguments as Megatron's command line has it. Raises ConfigError."""
    options = options or MegatronOptions()
    translation = translate(
        parse_arguments(words),
        entry_script(options.entry or DEFAULT_ENTRY),
        host,
        version=options.version,
        world_size=options.world_size,
    )
    processes = Processes(options.world_size or _one_process(translation))
    return result_of(translation, f"{len(translation.accounts)} arguments", processes)


def _one_process(translation: Translation) -> int | None:
    """1 for a layout of one process; a list of arguments does not say how many others have."""
    return 1 if all(translation.values[size] == 1 for size in MODEL_AXES) else None


def import_script(
    path: Path,
    host: PluginHost,
    *,
    define: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    options: MegatronOptions | None = None,
) -> ImportResult:
    """A bash script. define: values of its variables. arguments: its $1, $2, ... Nothing is executed.

    Raises ConfigError, with the line, for what cannot be read, and for a value that only running it would give.
    """
    options = options or MegatronOptions()
    scripts = [name for entry in ENTRY_SCRIPTS for name in entry.scripts]
    launch, unknowns = read_launch(path, define or {}, arguments, scripts, options.program)
    given_words, unset = _without_unset_words(launch.arguments, unknowns)
    if not isinstance(launch, ArgumentList) and options.entry is None and (why := absent_entry(launch.script)):
        raise ConfigError(f"{path.name}, line {launch.line}: {launch.script}: {why}")
    words = _known_words(given_words, unknowns)
    if isinstance(launch, ArgumentList):
        return _import_part(path, launch, words, host, options)
    entry, notes = _entry(launch, options)
    world = options.world_size or launch.world_size
    translation = translate(
        parse_arguments(words), entry, host, source=path.name, version=options.version, world_size=world
    )
    number = len(translation.accounts)
    source = f"{path.name}, line {launch.line}: {launch.script} with {number} arguments"
    notes += [*unset, *notes_on_environment(launch.environment)]
    return result_of(translation, source, _processes(launch, options), notes)


def _import_part(
    path: Path, argument_list: ArgumentList, words: Sequence[str], host: PluginHost, options: MegatronOptions
) -> ImportResult:
    """A file that only sets arguments for another script: the sections that they decide."""
    entry = entry_script(options.entry or _entry_of_arguments(words))
    parsed_arguments = parse_arguments(words)
    names = ", ".join(argument_list.names)
    translation = translate(parsed_arguments, entry, host, source=path.name, version=options.version, is_part=True)
    result = result_of(
        translation, f"{path.name}: {names} with {len(parsed_arguments)} arguments", Processes(options.world_size)
    )
    note = (
        f"{path.name} starts no program: {names} becomes a part of a configuration. Add what other files give: a "
        "learning rate, batch size, length and data. Dropout that it does not give is none"
    )
    return replace(result, notes=[note, *result.notes], complete=False)


def _entry_of_arguments(words: Sequence[str]) -> str:
    """A model with Mamba layers says so by its pattern, or its spec."""
    return "hybrid" if any(word in HYBRID_OPTIONS for word in words) else DEFAULT_ENTRY


def notes_on_environment(environment: Mapping[str, str]) -> Iterator[str]:
    """What becomes of variables that change the order of sums."""
    for name, what in ENVIRONMENT.items():
        if (value := environment.get(name)) is not None and is_known(value):
            yield f"the script sets {name}={value}, which is no argument: {what}"


def _entry(launch: Launch, options: MegatronOptions) -> tuple[EntryScript, list[str]]:
    entry = entry_of_file(launch.script)
    if options.entry is not None:
        return entry_script(options.entry), []
    if entry is not None:
        return entry, []
    note = f"{launch.script} is none of Megatron's scripts, and is read as pretrain_gpt.py; --entry names another"
    return entry_script(DEFAULT_ENTRY), [note]


def _processes(launch: Launch, options: MegatronOptions) -> Processes:
    if options.world_size is not None and options.world_size != launch.world_size:
        return Processes(options.world_size)
    return Processes(launch.nproc, launch.nnodes, launch.node_rank, launch.master_addr, launch.master_port)


def _known_words(words: Sequence[str], unknowns: Unknowns) -> list[str]:
    """The words with every value that counts. Raises one ConfigError that names each that is not known."""
    problems, known = Problems(), list[str]()
    for option, values in _by_option(words):
        group = [option, *values] if option else values
        argument = by_option().get(option)
        # A value that has no effect need not be known, such as the folder of TensorBoard.
        if argument is not None and argument.outcome == "none":
            known += [unknowns.readable(word) for word in group]
            continue
        for reason in unknowns.reasons_in(group):
            with problems.collect():
                raise ConfigError(f"{unknowns.readable(' '.join(group))}: {reason}")
        known += group
    # A missing file matters only if a value is unknown: it may be what would set it.
    for absent in unknowns.absent_files if problems.errors else ():
        with problems.collect():
            raise ConfigError(absent)
    problems.stop_if_any()
    return known


def _without_unset_words(words: Sequence[str], unknowns: Unknowns) -> tuple[list[str], list[str]]:
    """Words without variables that are not set and stand where no option takes a value, as bash leaves them out; and a
    note for each. Such variables are for arguments of the user's own."""
    kept, notes = list[str](), list[str]()
    for option, values in _by_option(words):
        taken = _number_of_values(option, len(values))
        extra = [word for word in values[taken:] if unknowns.is_unset(word)]
        kept += [option] if option else []
        kept += [word for place, word in enumerate(values) if place < taken or word not in extra]
        notes += [
            f"{unknowns.readable(word)} is not set in the script, and is left out as bash would" for word in extra
        ]
    return kept, notes


def _number_of_values(option: str, num_values: int) -> int:
    """How many of the words behind an option are its values."""
    argument = by_option().get(option.partition("=")[0])
    if argument is None:
        return 0 if not option else num_values
    if argument.is_flag or "=" in option:
        return 0
    if argument.count.isdigit() or not argument.count:
        return int(argument.count or 1)
    return num_values


def _by_option(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    option, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            yield option, values
            option, values = word, []
        else:
            values.append(word)
    yield option, values


# -- arguments in Megatron's checkpoints -------------------------------------------------------------

KEY = "megatron"
"""Key of a reader's metadata with the unchanged content of Megatron's files."""
FAMILIES: Mapping[str, str] = {"bert": "bert", "t5": "t5", "hybrid": "hybrid", "mamba": "hybrid"}
"""Family of the checkpoint's model -> the script that trains it, where it is not pretrain_gpt.py."""
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "encoder_num_layers": ("num_layers",),
    "encoder_seq_length": ("seq_length",),
    "start_weight_decay": ("weight_decay",),
    "end_weight_decay": ("weight_decay",),
    "eval_global_batch_size": ("global_batch_size",),
    "eval_micro_batch_size": ("micro_batch_size",),
    "padded_vocab_size": (),
    "tensor_parallel_num_weight_shards": (),
    "expert_tensor_parallel_num_weight_shards": (),
    "iterations_to_skip": (),
}
"""What Megatron's validation fills in -> the attributes that it equals then; without any: whatever they are."""


def import_checkpoint(path: Path, host: PluginHost, options: MegatronOptions) -> ImportResult:
    """path: what Megatron's --save named, or the folder of an iteration. Raises CheckpointError and ConfigError."""
    metadata = open_checkpoint(find_checkpoint(path), host).metadata
    if KEY not in metadata:
        raise ConfigError(f"{path} is no checkpoint of Megatron's, so that it has no arguments of its")
    stored = metadata[KEY]["args"]
    family = metadata["config"]["model"]["family"]
    entry = entry_script(options.entry or FAMILIES.get(family, "gpt"))
    parsed_arguments = {
        dest: parsed for dest, value in stored.items() if (parsed := _given(dest, value, stored)) is not None
    }
    translation = translate(parsed_arguments, entry, host, source=str(path), version=options.version or "main")
    processes = Processes(options.world_size or stored.get("world_size"))
    return result_of(translation, f"{path} with {len(parsed_arguments)} arguments that are no defaults", processes)


def _given(dest: str, value: Any, stored: Mapping[str, Any]) -> ParsedArgument | None:
    """An attribute as the argument that was given for it; None for defaults and what validation filled in."""
    argument = by_dest().get(dest)
    value = _plain(value)
    if argument is None or value is None or _is_object(value) or _follows(dest, value, stored):
        return None
    # None, False, 0 and "" are the same for an option that is off.
    if not value and not argument.default:
        return None
    if argument.count and not isinstance(value, list):
        value = [value]
    return None if value == argument.default else ParsedArgument(argument, argument.spelled, value)


def _follows(dest: str, value: Any, stored: Mapping[str, Any]) -> bool:
    return dest in FOLLOWS and all(stored.get(other) == value for other in FOLLOWS[dest])


def _is_object(value: Any) -> bool:
    # The representation of an object that the restricted reader did not build.
    return isinstance(value, str) and value.startswith("<")


def _plain(value: Any) -> Any:
    """Dtypes by Megatron's words."""
    words = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return words.get(value, value) if isinstance(value, str) else value

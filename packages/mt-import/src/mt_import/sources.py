"""Detects the kind of a file or folder, and imports it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mt_core.config.files import parse_yaml, read_values
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_import.fine_tuning.axolotl import import_axolotl, is_axolotl
from mt_import.fine_tuning.llama_factory import import_llama_factory, is_llama_factory
from mt_import.fine_tuning.trl import import_trl, is_trl
from mt_import.megatron_arguments.table import by_option
from mt_import.readers.accelerate import import_accelerate, is_accelerate
from mt_import.readers.bridge import import_bridge, is_bridge
from mt_import.readers.megatron import (
    MegatronOptions,
    import_checkpoint,
    import_script,
    import_words,
    notes_on_environment,
)
from mt_import.readers.torchtitan import import_torchtitan, is_torchtitan
from mt_import.result import ImportResult

FILES = (".yaml", ".yml", ".json", ".toml")
FUNCTIONAL_TEST = "MODEL_ARGS"
"""Map of Megatron's own functional tests: option with its dashes -> value, true for a flag."""
SECOND_RUN = "MODEL_ARGS_2"
VARIABLES = "ENV_VARS"
"""Map of the variables that a functional test sets."""
TEST_CASES = "test_cases"
"""Folder of functional tests, with a folder for each of Megatron's scripts."""
TEST_FOLDERS: Mapping[str, str] = {
    "bert": "bert",
    "t5": "t5",
    "hybrid": "hybrid",
    "mamba": "hybrid",
    "retro": "retro",
    "multimodal": "vlm",
    "multimodal-llava": "vlm",
}
"""Folder -> name of the script that its tests start, where it is not pretrain_gpt.py."""
_ESCAPES = re.compile(r"\\+(?=[|()])")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_OPTION_LINE = re.compile(r"\s+--[\w-]+:")

_FINE_TUNING = ((is_llama_factory, import_llama_factory), (is_axolotl, import_axolotl), (is_trl, import_trl))


def import_file(
    path: Path,
    host: PluginHost,
    *,
    define: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    options: MegatronOptions | None = None,
) -> ImportResult:
    """A launch script, a YAML file, or a checkpoint. Raises ConfigError.

    define: variables of a script or of a functional test. arguments: of a script.
    """
    options = options or MegatronOptions()
    if not path.exists():
        raise ConfigError(f"{path} does not exist; mt import takes a launch script, a YAML file or a checkpoint")
    if path.is_dir():
        return import_checkpoint(path, host, options)
    if path.suffix.lower() in FILES:
        return _import_values(_read(path), path, host, options, define or {})
    return import_script(path, host, define=define, arguments=arguments, options=options)


def _import_values(
    values: Any, path: Path, host: PluginHost, options: MegatronOptions, define: Mapping[str, str]
) -> ImportResult:
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, expected keys and values")
    # From the most specific mark to the least.
    if is_accelerate(values):
        return import_accelerate(values, path.name)
    if isinstance(values.get(FUNCTIONAL_TEST), dict):
        return _import_functional_test(values, path, host, options, define)
    for is_of_program, import_values in _FINE_TUNING:
        if is_of_program(values):
            return import_values(values, path.name)
    if is_torchtitan(values):
        return import_torchtitan(values, path.name, host)
    if is_bridge(values):
        return import_bridge(values, path.name, host, options)
    raise ConfigError(
        f"{path} is neither Accelerate's (distributed_type, megatron_lm_config), nor Megatron-Bridge's or NeMo's "
        "(model with trainer, train or optimizer), nor torchtitan's (model with a flavor), nor a test of Megatron's "
        f"({FUNCTIONAL_TEST}), nor LLaMA-Factory's (stage), "
        f"axolotl's (base_model) or TRL's (model_name_or_path); its keys are {', '.join(map(str, list(values)[:8]))}"
    )


def _read(path: Path) -> Any:
    """The values of a file. Options that a functional test has twice in one map, with one value, are read once."""
    try:
        return read_values(path)
    except ConfigError:
        text = path.read_text(encoding="utf-8", errors="replace")
        if f"{FUNCTIONAL_TEST}:" not in text:
            raise
    try:
        return parse_yaml(_without_repeated_options(text))
    except ValueError as error:  # an option twice, with two values
        raise ConfigError(f"{path}: {error}") from error


def _without_repeated_options(text: str) -> str:
    kept: list[str] = []
    seen: set[str] = set()
    for line in text.splitlines():
        if line and not line[0].isspace():  # the next map
            seen = set()
        option = line.partition("#")[0].rstrip()
        if not (_OPTION_LINE.match(line) and option in seen):
            kept.append(line)
        seen.add(option)
    return "\n".join(kept)


def _import_functional_test(
    values: Mapping[str, Any], path: Path, host: PluginHost, options: MegatronOptions, define: Mapping[str, str]
) -> ImportResult:
    entry = options.entry or _entry_of_folder(path)
    words = [_with_variables(word, define) for word in _words(values[FUNCTIONAL_TEST])]
    result = import_words(words, host, replace(options, entry=entry))
    environment = {name: str(value) for name, value in (values.get(VARIABLES) or {}).items()}
    notes = [*result.notes, *notes_on_environment(environment)]
    if SECOND_RUN in values:
        notes.append(f"{SECOND_RUN}, which a second run of the test has, is left out: it is another configuration")
    return replace(result, source=f"{path.name}, {FUNCTIONAL_TEST}: {result.source}", notes=notes)


def _with_variables(text: str, define: Mapping[str, str]) -> str:
    """With the values of ${NAME} that are defined; the program that runs the tests knows the others."""
    return _VARIABLE.sub(lambda match: define.get(match[1], match[0]), text)


def _entry_of_folder(path: Path) -> str | None:
    """The script of a functional test, by its folder below test_cases."""
    parts = [part.lower() for part in path.absolute().parts]
    below = parts[parts.index(TEST_CASES) + 1 :] if TEST_CASES in parts else []
    return next((TEST_FOLDERS[part] for part in below if part in TEST_FOLDERS), None)


def _words(values: Mapping[str, Any]) -> list[str]:
    """true is a flag, false leaves it out, anything else is the text of the values."""
    words: list[str] = []
    for option, value in values.items():
        if value is not False:
            words += [option] if value is True else [option, *_texts(option, value)]
    return words


def _texts(option: str, value: Any) -> list[str]:
    """Values in brackets are several, as a list is; others only of options that take several."""
    if isinstance(value, list):
        return [text for entry in value for text in str(entry).split()]
    # A shell takes the backslashes away before Megatron sees the value.
    text = _ESCAPES.sub("", str(value).strip())
    if text.startswith("[") and text.endswith("]") and not _is_pattern(option):
        return text[1:-1].split()
    argument = by_option().get(option)
    return text.split() if argument is None or argument.count else [text]


def _is_pattern(option: str) -> bool:
    argument = by_option().get(option)
    return argument is not None and argument.kind == "pattern"

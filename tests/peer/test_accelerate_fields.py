"""Fields of Accelerate's MegatronLMPlugin and options of its launcher, as its own source has them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest
from tests.peer.environment import installed_alone

from mt_accelerate import MegatronLMPlugin
from mt_accelerate.launch_options import read_options
from mt_core.errors import ConfigError


@pytest.mark.peer
def test_every_field_of_accelerates_plugin_is_one_of_ours() -> None:
    source = installed_alone("accelerate>=1.15") / "accelerate" / "utils" / "dataclasses.py"
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    (plugin,) = [node for node in classes if node.name == "MegatronLMPlugin"]
    theirs = {
        node.target.id for node in plugin.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert theirs == set(MegatronLMPlugin.model_fields)


# Another process, since transformers changes where Accelerate can be imported.
LIST_OPTIONS = """
import json
from accelerate.commands.launch import launch_command_parser
examples = {int: "2", float: "0.5", bool: "true"}
options = []
for one in launch_command_parser()._actions:
    example = str(one.choices[-1]) if one.choices else examples.get(one.type, "some")
    options.append((one.dest, one.option_strings, [] if one.nargs == 0 else [example]))
print(json.dumps(options))
"""


DONE = (
    *("num_processes", "num_machines", "mixed_precision", "multi_gpu", "cpu", "gpu_ids", "rdzv_backend", "rdzv_conf"),
    *("tee", "role", "debug", "module", "no_python", "main_training_function", "downcast_bf16", "monitor_interval"),
)


def read_or_refused(spelling: str, values: list[str]) -> str | None:
    """The reason of a refusal."""
    try:
        read = read_options([spelling, *values, "train.py", "--lr", "1"])
    except ConfigError as error:
        return str(error)
    # A flag that took a value, or the other way round, would take the program for it.
    assert read.program == ["train.py", "--lr", "1"], spelling
    return None


@pytest.mark.peer
def test_every_option_of_accelerates_launcher_is_done_or_refused_with_a_reason() -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed_alone("accelerate>=1.15"))}
    listed = subprocess.run(
        [sys.executable, "-c", LIST_OPTIONS], env=environment, capture_output=True, text=True, check=True
    )
    refused: dict[str, str] = {}
    options = [
        (name, spellings, values)
        for name, spellings, values in json.loads(listed.stdout)
        if spellings and name != "help"
    ]
    assert len(options) > 100
    for name, spellings, values in options:
        for spelling in spellings:
            if (reason := read_or_refused(spelling, values)) is not None:
                refused[name] = reason
    assert not {name: reason for name, reason in refused.items() if "has no option" in reason}
    assert not {name for name in refused if name.startswith("megatron_lm") or name in DONE}

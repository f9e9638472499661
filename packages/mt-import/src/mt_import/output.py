"""A configuration as a file, the command that trains with it, and the report of an import."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mt_core.config.files import shown, to_toml
from mt_core.errors import ConfigError
from mt_import.megatron_arguments.translation import Account
from mt_import.result import ImportResult, Processes, Status

Sections = Mapping[str, Mapping[str, Any]]


def configuration_text(sections: Sections, name: str) -> str:
    """name: of the file, whose ending says the format: .toml or .json. TOML has no null: such keys are comments."""
    if name.endswith(".json"):
        return json.dumps(sections, indent=2) + "\n"
    lines: list[str] = []
    for section, keys in sections.items():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        lines += [_toml_line(section, key, value) for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _toml_line(section: str, key: str, value: Any) -> str:
    if value is None:
        return f"# {key} is null, which TOML lacks: add --set {section}.{key}=null"
    return f"{key} = {to_toml(value)}"


def write_configuration(sections: Sections, path: Path) -> None:
    """Whole or not at all, since processes of one run may write the same file. Raises ConfigError."""
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"--output {path}: the name can end in .toml or .json")
    # Beside the target, since a rename is atomic within a file system only; with the process id, as others may write
    # it, too.
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(configuration_text(sections, path.name), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None


def launch_line(result: ImportResult, path: Path | None) -> str:
    """The command for each machine. Values that the source does not decide are words in capitals."""
    words = ["mt", "train", str(path or "CONFIG.toml"), *_processes(result.processes)]
    if path is None or path.suffix == ".toml":
        nulls = [f"{name}.{key}=null" for name, keys in result.sections.items() for key in keys if keys[key] is None]
        words += [word for null in nulls for word in ("--set", null)]
    return shlex.join(words)


def _processes(processes: Processes) -> list[str]:
    single_node = processes.nnodes == 1
    words = [] if processes.nproc == 1 and single_node else ["--nproc", str(processes.nproc or "PROCESSES")]
    if single_node:
        return words
    words += ["--nnodes", str(processes.nnodes or "MACHINES"), "--node-rank", processes.node_rank or "RANK"]
    words += ["--master-addr", processes.master_addr or "ADDRESS", "--master-port", processes.master_port or "PORT"]
    return words


# -- report, for people and as JSON ------------------------------------------------------------------

TITLES: Mapping[Status, str] = {
    "translated": "translated",
    "default": "same as our default",
    "no effect": "no effect here",
    "refused": "cannot be done",
}
WRITTEN = "written out: defaults that differ from ours, and derived values"
WIDTH = 46


def report_text(result: ImportResult, path: Path | None) -> str:
    """path: of the configuration that is written, for the launch line."""
    lines = [result.source]
    for status, title in TITLES.items():
        lines += _part(title, [(account.words, _outcome(account)) for account in result.of_status(status)])
    lines += _part(WRITTEN, [(key, shown(value)) for key, value in result.written_out.items()])
    lines += [f"\nnote: {note}" for note in result.notes]
    return "\n".join([*lines, "", launch_line(result, path)])


def _part(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield f"\n{title} ({len(rows)})"
    for left, right in rows:
        yield f"  {left:<{WIDTH}} {right}" if len(left) <= WIDTH else f"  {left}\n  {'':<{WIDTH}} {right}"


def _outcome(account: Account) -> str:
    return account.reason or ", ".join(f"{key} = {shown(value)}" for key, value in account.keys.items())


def report_json(result: ImportResult, path: Path | None, allowed: Collection[str]) -> str:
    """The same, with the configuration. ok: whether nothing is left out that --allow does not name."""
    values: dict[str, Any] = {
        "source": result.source,
        "ok": not result.refused_unless(allowed),
        "complete": result.complete,
        "arguments": [asdict(account) for account in result.accounts],
        "written_out": dict(result.written_out),
        "notes": list(result.notes),
        "processes": asdict(result.processes),
        "launch": launch_line(result, path),
        "config": result.sections,
    }
    return json.dumps(values, indent=2)

"""What the files of two runs' data held when they were trained, compared with each other and with what is there now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_core.data.file_contents import changed_files
from mt_ops.reading.json_lines import read_json
from mt_ops.reading.run import Run

CHECKPOINTS, LATEST, METADATA = "checkpoints", "latest", "metadata.json"
CONTENT, TOKENIZER = "data.content", "tokenizer.content"
"""Keys of the fingerprints of the training data and of the tokenizer."""
DIGITS = 12
"""Digits of a digest that are shown: enough to show that two differ."""


@dataclass(frozen=True)
class TrainedData:
    """identity: fingerprints of the training data and of the tokenizer, by key. files: path -> entry of
    `mt_core.data.file_contents`. Empty where a run recorded neither."""

    identity: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def trained_data(run: Run) -> TrainedData:
    """Data as the run's newest process that recorded it did; else the fingerprints of its newest checkpoint."""
    starts = [entry for entry in run.events if entry["kind"] == "start" and "files" in entry]
    if not starts:
        return TrainedData(identity=_of_checkpoint(run.path))
    files = {str(entry["path"]): entry for entry in starts[-1]["files"]}
    return TrainedData(starts[-1].get("data") or _of_checkpoint(run.path), files)


def _of_checkpoint(run_dir: Path) -> Mapping[str, str]:
    try:
        newest = (run_dir / CHECKPOINTS / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return {}
    metadata = read_json(run_dir / CHECKPOINTS / newest / METADATA)
    stored = metadata.get("data") if isinstance(metadata, Mapping) else None
    return stored if isinstance(stored, Mapping) else {}


@dataclass(frozen=True)
class OtherContent:
    """key: `data.content`, `tokenizer.content`, or the path of a file. text: for a reader."""

    key: str
    text: str


def other_contents(a: Run, b: Run) -> list[OtherContent]:
    """Files that both runs read from one path and that held something else; where no file is known, the fingerprints
    that differ."""
    first, second = trained_data(a), trained_data(b)
    files = list(_other_files(first, second))
    return files or list(_other_identities(a, b, first, second))


def _other_files(a: TrainedData, b: TrainedData) -> Iterator[OtherContent]:
    for path in a.files.keys() & b.files.keys():
        mine, theirs = a.files[path], b.files[path]
        if mine["digest"] != theirs["digest"]:
            yield OtherContent(path, f"{path} had other content: {_content(mine)} in A and {_content(theirs)} in B")


def _content(entry: Mapping[str, Any]) -> str:
    return f"{entry['bytes']:,} bytes, digest {entry['digest'][:DIGITS]}"


def _other_identities(a: Run, b: Run, first: TrainedData, second: TrainedData) -> Iterator[OtherContent]:
    """Fingerprints that differ, the tokenizer's first; nothing where the configuration names other files: then it is
    what differs. Data of texts has another fingerprint for another tokenizer."""
    other = [
        key for key in first.identity.keys() & second.identity.keys() if first.identity[key] != second.identity[key]
    ]
    same_tokenizer = _section(a, TOKENIZER) == _section(b, TOKENIZER)
    for key in sorted(other, key=lambda key: (not key.startswith("tokenizer."), key)):
        if _section(a, key) == _section(b, key) and (same_tokenizer or key != CONTENT):
            digests = f"{key} is {first.identity[key][:DIGITS]} in A and {second.identity[key][:DIGITS]} in B"
            yield OtherContent(key, f"{digests}: {_reason(key, other, a)}")


def _reason(key: str, other: Sequence[str], run: Run) -> str:
    if key == CONTENT and TOKENIZER in other:
        return "its texts have other tokens by the tokenizer, or are other texts"
    named = ", ".join(data_paths(run.config)) if key.startswith("data.") else "the tokenizer's files"
    return f"the same [{key.partition('.')[0]}] read other content from {named or 'its data'}"


def _section(run: Run, key: str) -> dict[str, Any]:
    prefix = key.partition(".")[0] + "."
    return {name: value for name, value in run.config.items() if name.startswith(prefix)}


def data_paths(config: Mapping[str, Any]) -> Iterator[str]:
    """What a configuration names for its data."""
    for key, value in config.items():
        if key.startswith("data.") and key.endswith(("_path", "_paths")) and value and "cache" not in key:
            entries = value if isinstance(value, list) else [value]
            yield from (str(entry.get("prefix", entry) if isinstance(entry, Mapping) else entry) for entry in entries)


def changed_since(run: Run) -> list[str]:
    """A line for each file on this machine that no longer holds what the run was trained on."""
    changed = changed_files(list(trained_data(run).files.values()))
    return [f"{entry['path']} is no longer what {run.name} was trained on: it was written again" for entry in changed]

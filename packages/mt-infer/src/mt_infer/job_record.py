"""What wrote a file of completions, in a file beside it: a run continues its own output and no other's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_infer.config import InferenceConfig
from mt_infer.sampling.parameters import SamplingParameters

FORMAT = 2
ENGINE_KEYS = (
    "max_sequence_length",
    "quantize_weights",
    "quantize_group_size",
    "quantize_output_layer",
    "cache_dtype",
)
"""Keys of [inference] that change what is generated."""


def job_of(source: Path, sampling: SamplingParameters, model: str | None, config: Config) -> dict[str, Any]:
    """model: its fingerprint; None for one in memory alone, of which nothing is compared."""
    # As they will be read back: tuples as lists, keys as texts.
    values = json.loads(json.dumps(asdict(sampling), default=str))
    engine = {f"inference.{key}": getattr(config.section(InferenceConfig), key) for key in ENGINE_KEYS}
    settings = {
        "precision.dtype": config.precision.dtype,
        "numerics.batch_invariant": config.numerics.batch_invariant,
        **engine,
    }
    return {"format": FORMAT, "model": model, "sampling": values, "settings": settings, "input": _hash_of_file(source)}


def require_same_job(job: Mapping[str, Any], target: Path, *, has_lines: bool) -> None:
    """Records the job of a new output. Raises ConfigError for an output of another job, with what differs."""
    record = record_of(target)
    if not has_lines:
        record.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
        return
    advice = f"give another --output, or delete {target} to begin anew"
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
        differing = list(_differences(before, job))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{target} has lines, and the record of their job, {record}, cannot be read; {advice}"
        ) from error
    if differing:
        raise ConfigError(f"{target} was begun by another job: {'; '.join(differing)}; {advice}")


def record_of(target: Path) -> Path:
    return target.with_name(target.name + ".job.json")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if before["format"] != now["format"]:
        yield f"its record has format {before['format']}, and this mt writes {now['format']}"
        return
    if before["input"] != now["input"]:
        yield "its input had other content"
    # A model in memory has no fingerprint.
    if None not in (before["model"], now["model"]) and before["model"] != now["model"]:
        yield "its model was another, or had other weights"
    for part in ("sampling", "settings"):
        # Parameters that only one of the two versions of mt has are compared too.
        for name in {**before[part], **now[part]}:
            old, new = before[part].get(name), now[part].get(name)
            if old != new:
                yield f"{name} was {json.dumps(old)}, and is {json.dumps(new)}"


def checkpoint_fingerprint(path: Path) -> str:
    """Hash of the names and the content of a checkpoint's files, wherever it lies. Reads all of them."""
    # Sorted: the order of a folder's entries is the file system's.
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = blake2b(digest_size=16)
    with ThreadPoolExecutor() as threads:
        # Threads overlap: hashlib releases the GIL for large buffers.
        for file, content in zip(files, threads.map(_hash_of_file, files), strict=True):
            digest.update(f"{file.relative_to(path)} {content}\n".encode())
    return digest.hexdigest()


def _hash_of_file(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()

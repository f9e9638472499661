"""A folder belongs to one job: what its files depend on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mt_core.errors import ConfigError
from mt_data.records import Record


def require_same_job(folder: Path, stored: Record, job: Record) -> None:
    """Raises ConfigError that names what differs from the job whose files are in the folder."""
    differences = [f"{name}: {was} there, {now} now" for name, was, now in _compared(stored, job) if was != now]
    if differences:
        raise ConfigError(f"{folder} is of another job ({'; '.join(differences)}); remove it, or give another project")


def _compared(stored: Record, job: Record) -> Iterator[tuple[str, str, str]]:
    for name in type(job).model_fields:
        yield name, _shown(getattr(stored, name)), _shown(getattr(job, name))


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

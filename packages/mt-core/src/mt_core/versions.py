"""Versions of installed distributions, which results record."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Distribution -> version, of those that are installed."""
    return {name: installed_version for name in distributions if (installed_version := _version(name)) is not None}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

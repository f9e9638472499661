"""Importing what only the corpus commands need, when they need it."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mt_core.errors import ConfigError


def require(module: str) -> Any:
    """The module, or a ConfigError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(f'this needs the package "{package}": pip install "mt-data[corpus]"') from error


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of what a result depends on; "" for what is absent."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

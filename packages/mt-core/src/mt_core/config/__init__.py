"""Typed configuration: one tree, every value with the place it came from."""

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.config.schema import Config, Section

__all__ = ["Config", "LoadedConfig", "Section", "load_config"]

"""Forms of a family's model in Hugging Face's format beside the family's own, such as scores in place of the LM head.

A distribution that changes models by a section of the configuration registers how those are written and read
(`mt_register_hugging_face_variants`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mt_core.kinds import Kind, Lazy, Spec


class WriteVariant(Protocol):
    def __call__(self, family: Any, config: Any) -> Any:
        """The map of a model of this configuration (a mt_core.config.Config) from that of its family; None: the
        variant is not turned on. Raises ConfigError for a model that the format cannot express."""
        ...


class ReadVariant(Protocol):
    def __call__(self, families: Sequence[Any], external: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]] | None:
        """(map, sections of the configuration beside [model]) of a config.json; None: it is none of this variant.

        families: the maps of all installed families.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class HuggingFaceVariantSpec(Spec):
    """Another form of models in Hugging Face's format, which sections of the configuration turn on."""

    write: Lazy[WriteVariant]
    read: Lazy[ReadVariant]


VARIANTS = Kind("hugging_face_variants", "a variant of Hugging Face's format", HuggingFaceVariantSpec, "mt-tune")

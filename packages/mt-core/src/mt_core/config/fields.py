"""The base of all sections of the configuration, and types of their keys."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

PositiveInt = Annotated[int, Field(gt=0)]
"""Type of a key: an integer above 0."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Type of a key: a finite number above 0."""
NonNegativeInt = Annotated[int, Field(ge=0)]
"""Type of a key: an integer of at least 0."""
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Type of a key: a finite number of at least 0."""
Probability = Annotated[float, Field(ge=0, le=1)]
"""Type of a key: a number from 0 to 1."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""Type of a key: a seed of 32 bits, as numpy.random.RandomState takes it."""


def used_when(default: Any, **conditions: Any) -> Any:
    """A field that only counts while other keys have certain values: those of its section, by their names, or those of
    another one, as `section.key`.

    A condition is a value or a tuple of values; where the other key is a list, one of them has to be in it. Setting the
    field while a condition does not hold is an error, since the value would be ignored:
    `rotary_base: float = used_when(1e4, position_embedding_type="rope")`.
    """
    listed: JsonDict = {key: list(value) if isinstance(value, tuple) else [value] for key, value in conditions.items()}
    return Field(default, json_schema_extra={"used_when": listed})


class Section(BaseModel):
    """Base of every section: no unknown key, no silent conversion of types, immutable once checked."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        defer_build=True,
    )

    selector: ClassVar[str | None] = None
    """The key of this section that names a registered plugin thing, if there is one."""
    keys_of_node: ClassVar[frozenset[str]] = frozenset()
    """Keys that may differ between the nodes of a run, such as a folder of the node's scratch."""

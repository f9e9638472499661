"""Values that somebody wrote and nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pydantic.fields import FieldInfo

from mt_core.config.layers import DEFAULT, Layer
from mt_core.errors import ConfigError, Problems

if TYPE_CHECKING:
    from mt_core.config.schema import Config, Section


def refuse_unused_values(
    config: Config, names: Iterable[str], origin_of: Callable[[str], str], problems: Problems
) -> None:
    """Collect a ConfigError for each such value in the sections `names`.

    A preset or a checkpoint may set what a file turns off. origin_of: dotted key -> layer.
    """
    for name in names:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items():
            origin = origin_of(f"{name}.{key}")
            # A value that equals the default is not lost when it is ignored.
            if origin == DEFAULT or Layer(origin, {}).is_background or _is_default(section, key, field):
                continue
            with problems.collect():
                _require_used(section, name, key, field, origin_of)


def _is_default(section: Section, key: str, field: FieldInfo) -> bool:
    return bool(getattr(section, key) == field.get_default(call_default_factory=True))


def _require_used(section: Section, name: str, key: str, field: FieldInfo, origin_of: Callable[[str], str]) -> None:
    extra = field.json_schema_extra
    conditions = extra.get("used_when", {}) if isinstance(extra, dict) else {}
    assert isinstance(conditions, dict)
    for other, allowed in conditions.items():
        assert isinstance(allowed, list)
        value = getattr(section, other)
        # Of a list one entry has to be allowed, such as recompute_modules with a certain module.
        if not any(entry in allowed for entry in (value if isinstance(value, list) else [value])):
            verb = "has" if isinstance(value, list) else "is"
            legal = " or ".join(str(value) for value in allowed)
            raise ConfigError(
                f"{name}.{key} (from {origin_of(f'{name}.{key}')}) would be ignored: it only counts when "
                f"{name}.{other} {verb} {legal}, and that is {value} "
                f"(from {origin_of(f'{name}.{other}')})"
            )

"""Options of scorers (--scorer-option KEY=VALUE)."""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.errors import ConfigError, did_you_mean


def require_known(scorer: str, options: Mapping[str, str], *names: str) -> Mapping[str, str]:
    """The options. Raises ConfigError for one that is none of `names`."""
    for option in options:
        if option not in names:
            hint = did_you_mean(option, names)
            raise ConfigError(f"--scorer {scorer} has no option {option}{hint}; it has {', '.join(names)}")
    return options

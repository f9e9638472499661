"""The section [profile]: which steps are recorded."""

from __future__ import annotations

from pydantic import model_validator

from mt_core.config.fields import NonNegativeInt, PositiveInt, Section
from mt_core.errors import ConfigError


class ProfileConfig(Section):
    """Steps that are recorded by torch's profiler, with train.callbacks = ["profile"]."""

    first_step: PositiveInt = 3
    """The first recorded step; those before warm the machine up."""
    last_step: PositiveInt = 5
    """The last recorded step."""
    ranks: list[NonNegativeInt] | None = None
    """Ranks that are recorded. Default: all."""
    folder: str | None = None
    """Where traces are written. Default: `profile` in the run directory."""

    @model_validator(mode="after")
    def _check(self) -> ProfileConfig:
        if self.last_step < self.first_step:
            raise ConfigError(
                f"profile.last_step={self.last_step} is before profile.first_step={self.first_step}; give a:b with a "
                "<= b"
            )
        if self.ranks == []:
            raise ConfigError("profile.ranks=[] records nothing; name a rank, or leave the key out for all")
        return self

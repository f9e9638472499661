"""`ProjectConfiguration`: the folders of a program's run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from mt_core.errors import ConfigError


@dataclass(frozen=True)
class ProjectConfiguration:
    """project_dir: of the run. logging_dir: of trackers that write files; default, project_dir.

    automatic_checkpoint_naming: `save_state()` writes checkpoints/checkpoint_N below project_dir. total_limit:
    of these; the oldest are removed. iteration: the next number. Raises ConfigError for save_on_each_node,
    and for a total_limit of states that the program names itself.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.save_on_each_node:
            raise ConfigError("ProjectConfiguration(save_on_each_node=True): states are written once; leave it out")
        if self.total_limit is not None and not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"ProjectConfiguration(total_limit={self.total_limit}) counts with automatic_checkpoint_naming=True"
            )
        if self.logging_dir is None:
            object.__setattr__(self, "logging_dir", self.project_dir)

    @classmethod
    def of(cls, given: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None) -> ProjectConfiguration:
        """From the arguments of `Accelerator`; project_dir fills in what project_config does not say."""
        if given is None:
            return cls(None if project_dir is None else str(project_dir))
        folder = given.project_dir or project_dir
        return replace(given, project_dir=None if folder is None else str(folder))

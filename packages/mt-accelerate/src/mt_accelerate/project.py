"""`ProjectConfiguration`: the folders of a program's run."""

from __future__ import annotations

from dataclasses import dataclass

from mt_core.errors import ConfigError


@dataclass(frozen=True)
class ProjectConfiguration:
    """project_dir: of the run. logging_dir: of trackers that write files; default, project_dir.

    States have the names that `save_state` is given, and all are kept: raises ConfigError for Accelerate's
    automatic_checkpoint_naming, total_limit and save_on_each_node.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        names = ("automatic_checkpoint_naming", "total_limit", "iteration", "save_on_each_node")
        if given := [name for name in names if getattr(self, name)]:
            raise ConfigError(
                f"ProjectConfiguration({given[0]}={getattr(self, given[0])!r}): states are written where "
                "save_state(output_dir) says, once, and all are kept; leave it out"
            )
        if self.logging_dir is None:
            object.__setattr__(self, "logging_dir", self.project_dir)

    @classmethod
    def of(cls, given: ProjectConfiguration | None, project_dir: str | None) -> ProjectConfiguration:
        """From the arguments of `Accelerator`; project_dir fills in what project_config does not say."""
        if given is None:
            return cls(project_dir)
        return cls(given.project_dir or project_dir, given.logging_dir)

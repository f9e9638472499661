"""What `mt train` does about several processes: whose world it checks against, and what each rank is given."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mt_core.config.schema import Config


@contextmanager
def world_of_launcher() -> Iterator[None]:
    """The world that torchrun, srun or `mt train --nproc` put this process in, by torchrun's variables."""
    from mt_core.launch.environment import read_environment

    environment = read_environment()
    if environment.world_size > 1:
        # srun sets variables of its own names; everything behind reads torchrun's. Not undone: this process is that
        # rank.
        os.environ.update(environment.variables())
    yield


def rank_arguments(config: Path | None, preset: str | None, settings: Sequence[str], run_dir: Path) -> list[str]:
    """The arguments of `mt` for each rank: the same training, without what concerns launching."""
    arguments = ["train", *([str(config)] if config is not None else [])]
    arguments += ["--preset", preset] if preset is not None else []
    arguments += [part for setting in settings for part in ("--set", setting)]
    # Always given, so that the launcher and all ranks use one folder.
    return [*arguments, "--run-dir", str(run_dir)]


def describe_launch(
    config: Config, nnodes: int, nproc: int, arguments: Sequence[str], master: tuple[str | None, int | None]
) -> str:
    """The ranks by axes, and each machine's command. master: address and port of the first machine, None by default."""
    from mt_core.launch.layout import describe
    from mt_core.train.build import axis_sizes, resolve_device

    device = resolve_device(config.train.device)
    return describe(axis_sizes(config), nnodes, nproc, arguments=arguments, master=master, device_type=device.type)


def draw_launch(config: Config, world_size: int, path: Path) -> None:
    """The ranks by axes as a picture."""
    from mt_core.parallel.plot import draw_layout
    from mt_core.train.build import axis_sizes

    path.write_text(draw_layout(axis_sizes(config), world_size), encoding="utf-8")

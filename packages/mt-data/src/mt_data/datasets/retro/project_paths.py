"""data.retro_project_dir: which files of a project the other keys would name."""

from __future__ import annotations

from pathlib import Path

from mt_core.errors import ConfigError, DataError
from mt_data.datasets.retro.config import RetroDataConfig
from mt_data.datasets.retro.project import FINGERPRINT_DIGITS, MANIFEST, database_folder, read_database
from mt_data.indexed.dataset import IndexedDataset


def with_project_paths(config: RetroDataConfig) -> RetroDataConfig:
    """With the text, the database and the neighbours of data.retro_project_dir, if that is given.

    Raises ConfigError for keys that say the same twice, and DataError for a project without neighbours of the text.
    """
    if config.retro_project_dir is None:
        return config
    for key in ("retro_database_path", "retro_neighbors_path"):
        if getattr(config, key) is not None:
            raise ConfigError(f"data.retro_project_dir={config.retro_project_dir} names data.{key} too; leave out one")
    project = Path(config.retro_project_dir)
    prefix = config.data_path or _only_text(project)
    paths = {
        "data_path": prefix,
        "retro_database_path": str(database_folder(project)),
        "retro_neighbors_path": str(_neighbors_of(project, prefix)),
    }
    return config.model_copy(update=paths)


def _only_text(project: Path) -> str:
    prefixes = read_database(database_folder(project)).prefixes
    if len(prefixes) > 1:
        raise ConfigError(
            f"data.retro_project_dir={project} has {len(prefixes)} texts; name one of them as data.data_path: "
            + ", ".join(prefixes)
        )
    return prefixes[0]


def _neighbors_of(project: Path, prefix: str) -> Path:
    """The folder of the text with this content, whatever its name was."""
    # The content identifies the folder, so a text that was moved or renamed still finds its neighbours.
    digits = IndexedDataset(prefix).fingerprint()[:FINGERPRINT_DIGITS]
    found = sorted(project.glob(f"query/*_{digits}/{MANIFEST}"))
    if not found:
        others = ", ".join(sorted(path.parent.name for path in project.glob(f"query/*/{MANIFEST}"))) or "none"
        raise DataError(
            f"data.retro_project_dir={project} has no neighbours of {prefix} with the content {digits}... (it has: "
            f"{others}); run mt retro query {project} --text {prefix}"
        )
    return found[0].parent

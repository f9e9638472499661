"""The release script refuses what does not fit together; nothing is built here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_script", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Two distributions, the second of which asks for the first."""
    for name, version, needs in (("mt-a", "0.2.0", ""), ("mt-b", "1.0.0", '"mt-a[x]>=0.1,<0.3", "numpy>=1"')):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{needs}]\n'
        )
        (folder / "CHANGELOG.md").write_text(f"# Changes\n\n## {version} (2026-11-22)\n\n- First.\n\n## 0.0.1 (x)\n")
    return tmp_path


def test_what_fits_together_passes(script: ModuleType, workspace: Path) -> None:
    for package in script.packages(workspace):
        script.check_changelog(package, tagging=True)
        script.check_siblings(package)
    assert script.Package("mt-a", workspace).tag == "mt-a-v0.2.0"


@pytest.mark.parametrize(
    ("changelog", "says"),
    [
        ("# Changes\n\n## 0.1.0 (2026-11-22)\n\n- First.\n", "version 0.2.0, the newest entry of CHANGELOG.md 0.1.0"),
        ("# Changes\n\n## 0.2.0 (2026-11-22)\n\n## 0.1.0 (2026-11-22)\n\n- First.\n", "lists no change"),
        ("# Changes\n\n## 0.2.0 (unreleased)\n\n- New.\n", "marked unreleased"),
        ("# Changes\n\n## 0.2.0 (soon)\n\n- New.\n", "expected a date or unreleased"),
        ("# Changes\n", "has no heading"),
    ],
)
def test_a_changelog_that_does_not_fit(script: ModuleType, workspace: Path, changelog: str, says: str) -> None:
    (workspace / "packages/mt-a/CHANGELOG.md").write_text(changelog)
    with pytest.raises(script.ReleaseError, match=says):
        script.check_changelog(script.Package("mt-a", workspace), tagging=True)


def test_a_range_that_leaves_out_a_sibling(script: ModuleType, workspace: Path) -> None:
    path = workspace / "packages/mt-b/pyproject.toml"
    path.write_text(path.read_text().replace("<0.3", "<0.2"))
    with pytest.raises(script.ReleaseError, match=r"asks for mt-a\[x\]>=0.1,<0.2, and the workspace has mt-a 0.2.0"):
        script.check_siblings(script.Package("mt-b", workspace))


def test_the_distributions_here_fit_together(script: ModuleType) -> None:
    for package in script.packages():
        script.check_changelog(package, tagging=False)
        script.check_siblings(package)

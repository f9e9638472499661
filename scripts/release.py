"""Builds, checks and tags a release of one distribution.

uv run scripts/release.py mt-core          builds and checks; says which tag it would make
uv run scripts/release.py mt-core --tag    makes the annotated tag, such as mt-core-v0.1.0
uv run scripts/release.py --all            checks every distribution

The wheel and the sdist are left in --out-dir; uploading them is `uv publish`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
HEADING = re.compile(r"^## (?P<version>\S+) \((?P<date>[^)]*)\)$", re.MULTILINE)
UNRELEASED = "unreleased"


class ReleaseError(Exception):
    """Something that has to be put right before the release."""


@dataclass(frozen=True)
class Package:
    """A distribution of the workspace. root: of the workspace."""

    name: str
    root: Path = ROOT

    @property
    def folder(self) -> Path:
        return self.root / "packages" / self.name

    @cached_property
    def project(self) -> Mapping[str, Any]:
        table: Mapping[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @property
    def version(self) -> str:
        return str(self.project["version"])

    @property
    def tag(self) -> str:
        return f"{self.name}-v{self.version}"


def packages(root: Path = ROOT) -> list[Package]:
    return [Package(path.name, root) for path in sorted((root / "packages").glob("mt-*"))]


def newest_entry(package: Package) -> tuple[str, str, str]:
    """(version, date, text) of the first section of the changelog."""
    path = package.folder / "CHANGELOG.md"
    if not path.exists():
        raise ReleaseError(f"{path} is missing")
    text = path.read_text(encoding="utf-8")
    headings = list(HEADING.finditer(text))
    if not headings:
        raise ReleaseError(f'{path} has no heading like "## {package.version} (2026-01-31)"')
    end = headings[1].start() if len(headings) > 1 else len(text)
    return headings[0]["version"], headings[0]["date"], text[headings[0].end() : end].strip()


def check_changelog(package: Package, *, tagging: bool) -> None:
    """That the newest entry is of this version, says something, and has a date when a tag is to be made."""
    version, date, text = newest_entry(package)
    if version != package.version:
        raise ReleaseError(
            f"{package.name}: pyproject.toml has version {package.version}, the newest entry of CHANGELOG.md {version}"
        )
    if not re.search(r"^- \S", text, flags=re.MULTILINE):
        raise ReleaseError(f"{package.name}: the entry {version} of CHANGELOG.md lists no change")
    if date != UNRELEASED and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ReleaseError(f"{package.name}: {version} ({date}) in CHANGELOG.md: expected a date or {UNRELEASED}")
    if tagging and date == UNRELEASED:
        raise ReleaseError(f"{package.name}: {version} is marked {UNRELEASED} in CHANGELOG.md; write the date")


def check_siblings(package: Package) -> None:
    """That the ranges of our other distributions that it asks for admit those of this workspace."""
    versions = {other.name: Version(other.version) for other in packages(package.root)}
    extras = [entry for entries in package.project.get("optional-dependencies", {}).values() for entry in entries]
    for entry in [*package.project["dependencies"], *extras]:
        wanted = Requirement(entry)
        there = versions.get(wanted.name)
        if there is not None and not wanted.specifier.contains(there, prereleases=True):
            raise ReleaseError(f"{package.name} asks for {entry}, and the workspace has {wanted.name} {there}")


def build(package: Package, folder: Path) -> list[Path]:
    """The wheel and the sdist."""
    run(["uv", "build", "--quiet", "--no-sources", "--package", package.name, "--out-dir", str(folder)], package.root)
    stem = f"{package.name.replace('-', '_')}-{package.version}"
    built = [folder / f"{stem}-py3-none-any.whl", folder / f"{stem}.tar.gz"]
    missing = [path.name for path in built if not path.exists()]
    if missing:
        raise ReleaseError(f"{package.name}: uv build made no {' and no '.join(missing)}")
    return built


def check_files(package: Package, built: Sequence[Path]) -> None:
    """Metadata by twine; that the license, the entry points and the mark of types are in the wheel."""
    run(["uvx", "twine", "check", "--strict", *map(str, built)], package.root)
    module = package.name.replace("-", "_")
    info = f"{module}-{package.version}.dist-info"
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    wanted = {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt", f"{module}/plugin.py", f"{module}/py.typed"}
    if missing := sorted(wanted - names):
        raise ReleaseError(f"{built[0].name} lacks {', '.join(missing)}")


def make_tag(package: Package) -> None:
    """An annotated tag of the commit at hand, which must be all that there is in the working tree."""
    if run(["git", "status", "--porcelain"], package.root):
        raise ReleaseError("the working tree has changes that are not committed")
    text = newest_entry(package)[2]
    run(
        ["git", "tag", "--annotate", package.tag, "--message", f"{package.name} {package.version}\n\n{text}"],
        package.root,
    )


def require_new_tag(package: Package) -> None:
    if run(["git", "tag", "--list", package.tag], package.root):
        raise ReleaseError(f"the tag {package.tag} exists; raise the version in packages/{package.name}/pyproject.toml")


def run(command: Sequence[str], folder: Path) -> str:
    """What the command prints. Raises ReleaseError with its output when it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def release(package: Package, out_dir: Path, *, tagging: bool) -> str:
    """What was done, in one line. Raises ReleaseError."""
    check_changelog(package, tagging=tagging)
    check_siblings(package)
    require_new_tag(package)
    built = build(package, out_dir)
    check_files(package, built)
    if tagging:
        make_tag(package)
    return f"{', '.join(path.name for path in built)}: {'tagged' if tagging else 'would be tagged'} {package.tag}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="distributions, such as mt-core")
    parser.add_argument("--all", action="store_true", help="every distribution")
    parser.add_argument("--tag", action="store_true", help="make the tags; without it nothing is changed")
    parser.add_argument("--out-dir", type=Path, help="for wheels and sdists; default: a temporary folder")
    given = parser.parse_args(arguments)
    known = {package.name: package for package in packages()}
    chosen = list(known) if given.all else given.names
    if unknown := [name for name in chosen if name not in known] or ([] if chosen else ["nothing"]):
        parser.error(f"no distribution is named {', '.join(unknown)}; they are {', '.join(known)}")
    out_dir = given.out_dir or Path(tempfile.mkdtemp(prefix="mt-release-"))
    try:
        for name in chosen:
            print(release(known[name], out_dir, tagging=given.tag))
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

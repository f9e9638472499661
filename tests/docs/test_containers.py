"""The container recipe installs what the workspace has, from images by plain names and files that are there."""

from __future__ import annotations

import re
import tomllib

import pytest
from tests.docs.blocks import ROOT

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
REQUIREMENTS = [
    re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?", line)
    for line in (ROOT / "docker" / "requirements.txt").read_text().splitlines()
]


def test_every_distribution_is_installed_with_extras_that_it_has() -> None:
    assert all(REQUIREMENTS)
    names = [found[1] for found in REQUIREMENTS if found]
    assert sorted(names) == sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
    for found in REQUIREMENTS:
        project = tomllib.loads((ROOT / "packages" / found[1] / "pyproject.toml").read_text())["project"]  # type: ignore[index]
        extras = set(filter(None, (found[2] or "").split(",")))  # type: ignore[index]
        assert extras <= project.get("optional-dependencies", {}).keys()


def test_torch_is_the_one_that_mt_core_allows() -> None:
    core = tomllib.loads((ROOT / "packages/mt-core/pyproject.toml").read_text())["project"]
    allowed = [one for one in core["optional-dependencies"]["train"] if one.startswith("torch")]
    assert re.findall(r'"(torch[^"]*)"', DOCKERFILE) == allowed


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_targets_are_built_from_images_by_plain_names(target: str) -> None:
    arguments = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", DOCKERFILE, re.MULTILINE))
    stages = {
        name: arguments[image] for image, name in re.findall(r"^FROM \$\{(\w+)\} AS (\w+)$", DOCKERFILE, re.MULTILINE)
    }
    # A first part with a dot or a port would be the host of a registry.
    assert re.fullmatch(r"(?:[a-z]+/)?[a-z]+:[\w.-]+", stages[target])
    assert f"--target {target}" in (ROOT / "docs" / "guides" / "containers.md").read_text()
    for copied in re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE, re.MULTILINE):
        assert (ROOT / copied).exists()

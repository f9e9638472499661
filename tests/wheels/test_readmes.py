"""The README of a distribution is its page on a package index: it stands alone there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGES = sorted(path for path in Path(__file__).parents[2].joinpath("packages").iterdir() if path.is_dir())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_it_says_what_the_package_is_for_and_how_to_begin(package: Path) -> None:
    text = (package / "README.md").read_text()
    assert text.startswith(f"# {package.name}\n")
    assert re.search(rf"pip install .*{package.name}", text)
    assert len(text.split()) > 120
    assert "```" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith(("#", "https://"))] == []  # a path leads nowhere there

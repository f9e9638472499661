"""The distributions of the workspace and what each needs, from their pyproject.toml files."""

from __future__ import annotations

import re
import tomllib

from scripts.figures.registry import HERE, figure
from scripts.figures.svg import Canvas

PACKAGES = HERE.parents[1] / "packages"


def needs() -> dict[str, set[str]]:
    """Distribution -> those of the workspace that it depends on."""
    found = {}
    for path in sorted(PACKAGES.glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        words = [re.split(r"[\[<>=~! ;]", one)[0] for one in project.get("dependencies", [])]
        found[project["name"]] = {word for word in words if word.startswith("mt-") and word != project["name"]}
    return found


def floors(found: dict[str, set[str]]) -> dict[str, int]:
    """Distribution -> 0 for what needs none, else one above the highest that it needs."""
    level: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in level:
            level[name] = 1 + max((of(other) for other in found[name]), default=-1)
        return level[name]

    return {name: of(name) for name in found}


@figure("architecture-distributions")
def distributions() -> Canvas:
    found = needs()
    level = floors(found)
    rows = [[name for name in found if level[name] == floor] for floor in range(max(level.values()) + 1)]
    rows = [row for row in rows if row]
    widest = max(len(row) for row in rows)
    canvas = Canvas(
        max(170 * widest + 20, 760),
        70 + 96 * (len(rows) - 1) + 36,
        "The distributions of mt; a line leads down to what a distribution depends on",
    )
    place = {}
    for floor, row in enumerate(rows):
        y = canvas.height - 60 - 96 * floor
        for number, name in enumerate(row):
            place[name] = (canvas.width / 2 + (number - (len(row) - 1) / 2) * (canvas.width - 20) / widest, y)
    for name, others in found.items():
        # A dependency that another one brings along is not drawn.
        direct = {o for o in others if not any(o in found[p] for p in others)}
        for other in sorted(direct):
            (x1, y1), (x2, y2) = place[name], place[other]
            canvas.line(x1, y1 + 34, x2, y2, "rule", 1.4)
    for name, (x, y) in place.items():
        canvas.rect(x - 72, y, 144, 34, f"c{level[name] % 6}", stroke="edge", radius=5)
        canvas.text(x, y + 21, name, anchor="middle")
    return canvas

"""Text for docs/retro.md, from the sources of the standard library that the interpreter carries:

    python examples/retro_data.py FOLDER

FOLDER/text.jsonl has a module in each line. Those for validation are the last ones; the order is random but fixed.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SMALLEST, LARGEST = 500, 40_000
"""Bytes of a module."""
TOTAL = 4_000_000
"""Bytes of all."""
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}


def modules() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.rglob("*.py") if not SKIPPED & set(path.parts))
    random.Random(0).shuffle(paths)
    left = TOTAL
    for path in paths:
        size = path.stat().st_size
        if SMALLEST <= size <= min(LARGEST, left):
            left -= size
            yield path.read_text(encoding="utf-8", errors="replace")


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(modules())
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{folder}/text.jsonl: {len(texts)} modules, {sum(map(len, texts)) / 1e6:.1f} million characters")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""Sums of three digits for docs/guides/reinforcement-learning.md: python examples/digit_sums.py FOLDER

careless.jsonl has answers to teach the form from, of which one in five is right and the others are up to 4 too large.
prompts.jsonl has the same sums with the right answer for a reward, and held-out.jsonl a tenth of all sums, which are in
neither of the two.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

HELD_OUT = 100
OFFSETS = (0, 1, 2, 3, 4)


def write_lines(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sums = [("+".join(map(str, digits)) + "=", sum(digits)) for digits in product(range(10), repeat=3)]
    random.Random(0).shuffle(sums)
    careless = [(text, value + offset) for text, value in sums[HELD_OUT:] for offset in OFFSETS]
    write_lines(folder / "careless.jsonl", ({"prompt": text, "completion": str(value)} for text, value in careless))
    for name, part in (("held-out", sums[:HELD_OUT]), ("prompts", sums[HELD_OUT:])):
        write_lines(folder / f"{name}.jsonl", ({"prompt": text, "answer": str(value)} for text, value in part))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

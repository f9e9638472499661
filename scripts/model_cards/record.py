"""Runs the comparisons of families and keeps their numbers: python -m scripts.model_cards.record [FAMILY ...]."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

from scripts.model_cards.compare import compare
from scripts.model_cards.layouts import proved
from scripts.model_cards.results import RESULTS, read
from tests.ckpt.convert_cases import MODELS
from tests.ckpt.family_cases import CASES

from mt_core.plugins import load_plugins

OTHER_SAMPLES = {"bert", "modernbert", "t5", "vision", "llava"}
"""Families that do not train on plain text; their own tests divide them."""


def record(family: str) -> dict[str, Any]:
    host = load_plugins()
    cases = {name: compare(name, host) for name, case in CASES.items() if case.family == family}
    trained = [name for name, keys in MODELS.items() if keys["family"] == family and family not in OTHER_SAMPLES]
    return {
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "cases": cases,
        "layouts": {name: proved(name) for name in trained},
    }


def main(names: list[str]) -> None:
    for family in names or dict.fromkeys(case.family for case in CASES.values()):
        results = {**read(), family: record(family)}
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
        print(family, json.dumps(results[family])[:300], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

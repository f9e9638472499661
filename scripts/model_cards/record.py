"""Runs the comparisons of families and keeps their numbers: python -m scripts.model_cards.record [FAMILY ...]."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

from scripts.model_cards.compare import compare
from scripts.model_cards.layouts import proved
from scripts.model_cards.results import RESULTS, WITHOUT_CLASS, read
from scripts.model_cards.trainings import trainings
from tests.ckpt.family_cases import CASES

from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import MODELS

CASES_ONLY, EVERY_LAYOUT = "--cases", "--every-layout"
"""Options: keep the recorded layouts, whose trainings take most of the time; train in five instead of three."""


def record(family: str, host: PluginHost, options: set[str]) -> dict[str, Any]:
    if CASES_ONLY in options:
        layouts = read().get(family, {}).get("layouts", {})
    else:
        layouts = proved(dict(trainings(family)), every=EVERY_LAYOUT in options)
    return {
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "cases": {name: compare(case, host) for name, case in CASES.items() if case.family == family},
        "layouts": layouts,
    }


def main(arguments: list[str]) -> None:
    host, options = load_plugins(), {CASES_ONLY, EVERY_LAYOUT} & {*arguments}
    names = [name for name in arguments if name not in options]
    for family in names or [spec.name for spec in host[MODELS]]:
        result = record(family, host, options)
        if result["cases"] or result["layouts"] or family in WITHOUT_CLASS:
            RESULTS.write_text(
                json.dumps(dict(sorted({**read(), family: result}.items())), indent=1) + "\n", encoding="utf-8"
            )
            print(family, json.dumps(result)[:300], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The recorded numbers, and the text that the documentation shows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mt_core.plugins import PluginHost
from mt_core.specs import MODELS, ModelSpec

RESULTS = Path(__file__).parent / "results.json"
PAGES = Path(__file__).parents[2] / "docs" / "models"
BEGIN, END = "<!-- card: python -m scripts.model_cards -->", "<!-- end of card -->"
PAGE_OF = {
    "qwen_vl": "qwen2_5_vl",
    "bert_classification": "bert",
    "modernbert_classification": "modernbert",
    "bert_multiple_choice": "bert",
    "gpt_classification": "gpt",
    "llama_classification": "llama",
}
"""Families on a page of another name."""
LABELS = {
    "tp-sp": "TP 2 with sequence parallelism",
    "cp": "CP 2",
    "pp": "PP 2",
    "zero": "distributed optimizer, 2 ranks",
    "ep": "EP 2",
}


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def page_of(family: str) -> str:
    return PAGE_OF.get(family, family)


def card(family: str, result: dict[str, Any]) -> str:
    """The lines between the markers of a page."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        BEGIN,
        f"## Compared: {family}",
        "",
        f"Small models in fp32 on a CPU, {versions}. Errors are the largest difference over the largest value; of "
        "gradients, for each parameter by itself.",
        "",
    ]
    if result["cases"]:
        lines += ["| model | against | outputs | gradients | weights back | greedy with cache |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        lines += [case_row(name, case) for name, case in result["cases"].items()]
    if result["layouts"]:
        lines += ["", "| layout, against one process | largest difference of a gradient or weight after two steps |"]
        lines += ["| --- | --- |", *layout_rows(result["layouts"])]
    return "\n".join([*lines, END, ""])


def case_row(name: str, case: dict[str, Any]) -> str:
    gradients = f"{case['gradients']:.1e}" if "gradients" in case else "-"
    same = {True: "bit for bit", False: "DIFFERENT", None: "-"}[case.get("weights")]
    greedy = {True: "equal", False: "DIFFERENT", None: "-"}[case.get("greedy")]
    return f"| {name} | `{case['class']}` | {case['outputs']:.1e} | {gradients} | {same} | {greedy} |"


def layout_rows(layouts: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"| {name}: {LABELS.get(label, label)} | {found if isinstance(found, str) else f'{found:.1e}'} |"
        for name, of_layout in layouts.items()
        for label, found in of_layout.items()
    ]


# -- the table of all families -----------------------------------------------------------------------


def table(host: PluginHost, results: dict[str, Any]) -> str:
    rows = [
        table_row(spec, results.get(spec.name))
        for spec in host[MODELS]
        if (PAGES / f"{page_of(spec.name)}.md").exists()
    ]
    return "\n".join(
        [
            "| family | Hugging Face `model_type` | what it is | presets | largest error of outputs | layouts proved |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def table_row(spec: ModelSpec, result: dict[str, Any] | None) -> str:
    types = spec.name_maps["hf"].load().model_types if "hf" in spec.name_maps else {}
    kinds = ", ".join(f"`{kind}`" for kind in types) or "-"
    error = f"{max(case['outputs'] for case in result['cases'].values()):.0e}" if result and result["cases"] else "-"
    of_models = result["layouts"].values() if result else ()
    layouts = {label for found in of_models for label, error in found.items() if not isinstance(error, str)}
    proved = ", ".join(label for label in LABELS if label in layouts) or "see the page"
    presets = len(spec.presets.load()) if spec.presets else 0
    return f"| [{spec.name}]({page_of(spec.name)}.md) | {kinds} | {spec.doc} | {presets} | {error} | {proved} |"

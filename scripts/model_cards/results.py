"""The recorded numbers, and the text that the documentation shows of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    "gpt_multiple_choice": "gpt",
    "llama_classification": "llama",
    "llama_multiple_choice": "llama",
}
"""Families on a page of another name."""
LABELS = {
    "tp": "TP 2",
    "tp-sp": "TP 2 with sequence parallelism",
    "cp": "CP 2",
    "pp": "PP 2",
    "zero": "distributed optimizer, 2 ranks",
    "ep": "EP 2",
}
DRAWS = 12
"""How often weights are drawn where errors of gradients are compared with fp64: the largest error varies."""
WITHOUT_CLASS = {
    "kimi_k3": "`transformers` has no class of it: `tests/models/test_kimi_k3.py` has its formulas in fp64.",
    "rwkv7": "`transformers` has no class of it: `tests/models/test_rwkv7.py` has its recurrence in plain torch.",
    "retro": "`transformers` has no class of it: `tests/models/test_retro.py` has its layers in plain torch.",
    "biencoder": "Its encoders are those of [bert](bert.md); `tests/models/test_biencoder.py` has its losses in fp64.",
}
"""Families -> what they are compared with instead."""


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def page_of(family: str) -> str:
    return PAGE_OF.get(family, family)


def documented(host: PluginHost) -> Iterator[ModelSpec]:
    """Families that have a page: all but a module of the user's own."""
    return (spec for spec in host[MODELS] if (PAGES / f"{page_of(spec.name)}.md").exists())


# -- the card of a family ----------------------------------------------------------------------------


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
        lines += ["| model | against | outputs | loss | gradients | weights back | greedy with cache |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        lines += [case_row(name, case) for name, case in result["cases"].items()]
    elif family in WITHOUT_CLASS:
        lines += [WITHOUT_CLASS[family]]
    lines += exact_rows(result["cases"])
    if result["layouts"]:
        lines += ["", "| layout, against one process | largest difference of a gradient or weight after two steps |"]
        lines += ["| --- | --- |", *layout_rows(result["layouts"])]
    return "\n".join([*lines, END, ""])


def case_row(name: str, case: dict[str, Any]) -> str:
    errors = " | ".join(f"{case[key]:.1e}" if case[key] else "0" for key in ("outputs", "loss", "gradients"))
    same = {True: "bit for bit", False: "DIFFERENT"}[case["weights"]]
    greedy = {True: "equal", False: "DIFFERENT", None: "-"}[case.get("greedy")]
    return f"| {name} | `{case['class']}` | {errors} | {same} | {greedy} |"


def exact_rows(cases: dict[str, Any]) -> list[str]:
    rows = [
        f"| {name} | {case['fp64']['mt']:.1e} | {case['fp64']['transformers']:.1e} |"
        for name, case in cases.items()
        if "fp64" in case
    ]
    head = [
        "",
        "Gradients that differ by more than 1e-05, against those of the same model of `transformers` in fp64; "
        f"geometric means of the largest errors over {DRAWS} draws of weights:",
        "",
        "| model | mt in fp32 | `transformers` in fp32 |",
        "| --- | --- | --- |",
    ]
    return [*head, *rows] if rows else []


def layout_rows(layouts: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"| {name}: {LABELS.get(label, label)} | {found if isinstance(found, str) else f'{found:.1e}'} |"
        for name, of_layout in layouts.items()
        for label, found in of_layout.items()
    ]


# -- the tables of all families ----------------------------------------------------------------------


def table(host: PluginHost, results: dict[str, Any]) -> str:
    """Of the page of models."""
    return "\n".join(
        [
            "| family | Hugging Face `model_type` | what it is | presets | largest error of outputs | layouts proved |",
            "| --- | --- | --- | --- | --- | --- |",
            *(table_row(spec, results.get(spec.name)) for spec in documented(host)),
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
    return (
        f"| [{spec.name}]({page_of(spec.name)}.md) | {kinds} | {spec.doc} | {num_presets(spec)} | {error} | {proved} |"
    )


def num_presets(spec: ModelSpec) -> int:
    return len(spec.presets.load())


def short_table(host: PluginHost) -> str:
    """Of the first page: which models there are, and which formats they are read from and written to."""
    return "\n".join(
        [
            "| family | published models | presets | beside text | Hugging Face | GGUF | Megatron |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *map(short_row, documented(host)),
            "",
        ]
    )


def short_row(spec: ModelSpec) -> str:
    formats = " | ".join("yes" if name in spec.name_maps else "-" for name in ("hf", "gguf", "megatron"))
    models, _, explained = spec.doc.partition(": ")
    named = models if explained else "-"
    page = f"models/{page_of(spec.name)}.md"
    return f"| [{spec.name}]({page}) | {named} | {num_presets(spec)} | {beside_text(spec)} | {formats} |"


def beside_text(spec: ModelSpec) -> str:
    """What a model takes, by the towers and images that its configuration declares."""
    fields: dict[str, Any] = spec.config_type.load().model_fields
    kinds = {"pictures": ("vision_model", "img_h"), "sound": ("audio_model",)}
    return ", ".join(kind for kind, keys in kinds.items() if any(key in fields for key in keys)) or "-"

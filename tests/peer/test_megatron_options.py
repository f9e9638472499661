"""The table of Megatron's options against its own parser, read as a syntax tree: type, number of values, choices.

The parser is that of core 0.15, in a package whose authors have added options of their own (`THEIR_OWN`). What another
version has otherwise stands in `OTHER_VERSIONS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
from tests.peer.environment import installed_alone
from tests.peer.test_megatron_scripts import PACKAGE, SOURCES

from mt_import.megatron_arguments.table import Argument, by_option

ACTIONS = {"store_true": "true", "store_false": "false", "BooleanOptionalAction": "pair"}
TYPES = {
    "str": "text",
    "int": "int",
    "float": "float",
    "bool": "text",  # any text
    "moe_freq_type": "pattern",
    "no_rope_freq_type": "pattern",
    "tuple_type": "window",
    "AttnBackend[attn_backend]": "text",
}
"""Name of the function that reads a value there -> ours."""
OTHER_VERSIONS: Mapping[str, str] = {
    "--cuda-graph-scope": "text+ since 0.16, deprecated",
    "--rampup-batch-size": "three integers on the main branch; text of any number before",
    "--recompute-modules": "one or more on the main branch",
    "--lazy-mpu-init": "a flag on the main branch",
    "--disable-mamba-mem-eff-path": "the opposite attribute on the main branch",
    "--disable-msc": "the opposite attribute on the main branch",
}
"""Option that is read otherwise there -> what the table follows instead."""
THEIR_OWN = {
    *("enable-hetero", "hetero-device-types", "hetero-current-device-type", "hetero-pipeline-layer-split"),
    *("hetero-process-meshes", "expert-tensor-parallel-size-per-process-mesh", "hetero-use-cpu-communication"),
    *("use-partial-reduce-for-shared-embedding", "no-shared-fs", "initialize-socket-comms", "auto-tune"),
    *("auto-skip-spiky-loss", "spiky-loss-threshold", "peft-type", "lora-target-modules", "lora-dim", "lora-alpha"),
    *("lora-dropout", "lora-dropout-position", "lora-in-init-method", "lora-out-init-method", "norm-init-weight"),
    *("multiple-of", "hidden-dim-multiplier", "wandb-mode", "wandb-api-key", "wandb-log-model", "use-dualpipev"),
    *("wandb-log-model-interval", "recompute-granularity-per-stage-micro-batch", "moe-fb-overlap"),
    *("recompute-method-per-stage-micro-batch", "recompute-num-layers-per-stage-micro-batch", "skip-samples-range"),
    *("skip-iters-range", "lr-decay-stablelm2-cosine-samples", "lr-decay-stablelm2-cosine-max-lr"),
    *("lr-decay-stablelm2-cosine-period-samples", "lr-decay-stablelm2-rsqrt-samples"),
    *("lr-decay-stablelm2-decay-samples", "lr-decay-stablelm2-alpha", "lr-decay-stablelm2-beta"),
    *("rampup-save-interval", "save-when-num-microbatches-change", "extra-eval-interval", "special-tokens-file"),
    *("tokenizer-path", "extra-valid-data-path", "finetune-dataset-type", "num-mtp-predictor", "mtp-loss-coeff"),
    *("apply-sft-dataset-separated-loss-mask-if-existed", "qk-layernorm-hidden-dim"),
    # Megatron's, where a package is installed that is not published.
    *("kitchen-config-file", "kitchen-recipe-number"),
}
THEIR_CHOICES = {"stablelm2-scheduler", "Qwen2VLTokenizer", "flagcx"}
"""And tokenizers that end with FS."""


@cache
def parser() -> Mapping[str, Mapping[str, ast.expr]]:
    """Option -> keywords of its `add_argument`."""
    tree = ast.parse((installed_alone(PACKAGE) / SOURCES / "megatron/training/arguments.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    spelled = [
        (word.value, {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None})
        for call in added
        for word in call.args
        if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("--")
    ]
    return {option: keywords for option, keywords in spelled if option.removeprefix("--") not in THEIR_OWN}


def takes_there(keywords: Mapping[str, ast.expr]) -> str:
    """In the table's words."""
    if "action" in keywords:
        return ACTIONS[_name(keywords["action"])]
    count = ast.literal_eval(keywords["nargs"]) if "nargs" in keywords else ""
    return TYPES[_name(keywords["type"]) if "type" in keywords else "str"] + str(count)


def _name(value: ast.expr) -> str:
    if isinstance(value, ast.Lambda):
        return ast.unparse(value.body)
    return str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value).rpartition(".")[2]


def choices_there(keywords: Mapping[str, ast.expr]) -> set[str]:
    """Empty for those that are computed when the parser is built."""
    try:
        values = ast.literal_eval(keywords["choices"]) if "choices" in keywords else ()
    except ValueError:
        return set()
    return {str(value) for value in values if not str(value).endswith("FS")} - THEIR_CHOICES


def options() -> Iterator[tuple[str, Argument, Mapping[str, ast.expr]]]:
    for option, keywords in parser().items():
        assert option in by_option(), option
        yield option, by_option()[option], keywords


def test_each_option_takes_what_it_takes_there() -> None:
    compared = {option: (row.takes, takes_there(keywords)) for option, row, keywords in options()}
    assert len(compared) > 540
    differ = {option: both for option, both in compared.items() if both[0] != both[1]}
    assert differ.keys() == OTHER_VERSIONS.keys(), differ


def test_what_it_can_be_there_it_can_be_here() -> None:
    """Of options that decide something: a value of another one is not looked at."""
    deciding = [(option, row, choices_there(keywords)) for option, row, keywords in options() if row.outcome != "none"]
    assert sum(bool(choices) for _, _, choices in deciding) > 15
    missing = {
        option: choices - set(row.choices)
        for option, row, choices in deciding
        if (choices or row.choices) and not choices <= set(row.choices)
    }
    assert missing == {}


def test_destinations_are_those_of_the_parser() -> None:
    given = {option: keywords["dest"] for option, _, keywords in options() if "dest" in keywords}
    assert len(given) > 40
    differ = {
        option: (by_option()[option].dest, ast.literal_eval(dest))
        for option, dest in given.items()
        if by_option()[option].dest != ast.literal_eval(dest)
    }
    # Renamed on the main branch, which the table follows.
    renamed = {"--disable-gloo-process-groups", "--disable-msc", "--fp4-param-gather", "--inference-max-requests"}
    assert differ.keys() == renamed, differ


@pytest.mark.parametrize("option", ["--grpo-default-top-p", "--retro-attention-gate"])
def test_a_number_with_a_point_is_one(option: str) -> None:
    from mt_import.megatron_arguments.command_line import parse_arguments

    (given,) = parse_arguments([option, "0.95"]).values()
    assert given.value == 0.95

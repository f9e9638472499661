"""Every argument of Megatron-LM: how its parser reads it, and what it stands for here.

Facts of Megatron-LM core_v0.12.2 (2025-06) and of its main branch of 2026-08; options of older versions and of those
between are in the table, too. The data is in arguments.csv, with these columns:

    option, dest        as typed, without dashes; the attribute that it sets
    takes               int, float, text, pattern (a number or a list of 0 and 1), window (two integers); with * or +
                        any number of values, with a digit so many; true, false: it takes no value and sets this;
                        pair: --x and --no-x
    choices             separated by |
    default             of Megatron's main branch; empty: None, False of `true`, True of `false`; none: None of these
    default_0_12        where core_v0.12 has another one
    versions            empty: main branch; 0.12: up to 0.12 or so; between: after 0.12, gone since; older: before 0.12;
                        vlm: of pretrain_vlm.py and examples/multimodal; modelopt: of examples/post_training
    outcome, keys       copy: its value is that of the key; model, rule: the keys that it decides, among others;
                        none: no effect here; refused: any value but the default
    reason              of none: a word of REASONS, or `with` and the option that it counts with; of refused: what it
                        requests
    group               of Megatron's --help
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Outcome = Literal["copy", "model", "rule", "none", "refused"]
Version = Literal["0.12", "main"]
FLAGS: Mapping[str, Any] = {"true": False, "false": True, "pair": False}
"""What takes no value -> its default."""
WITH = "with "
"""Before the option that a reason names, without which the argument counts for nothing."""
REASONS: Mapping[str, str] = {
    "arguments": "the arguments that are given count; a checkpoint of another model is refused by its names and shapes",
    "chat": "tokenizer.chat_template and the tokenizer's own files say how conversations are written",
    "checkpoints": "checkpoints are written in the format of mt; mt convert writes others",
    "checks": "a check that ends or repeats a step; losses and gradients that are not finite are always found",
    "code": "no code that comes with a tokenizer is run",
    "comm": "how messages are sent and overlapped changes no result",
    "converts": "mt convert converts checkpoints, without a run",
    "data": "how samples are read changes none of them",
    "experimental": "only permits other options, each of which is accounted for by itself",
    "fast": "both implementations of a tokenizer give the same ids",
    "fim": "counts only with --fim-data and other than its default",
    "finite": "losses and gradients are always checked for values that are not finite",
    "fp8-weights": "16-bit copies of the weights are collected, 2 bytes each where Megatron sends 1, and quantized for "
    "each product, which differs by a rounding",
    "fsdp-dtype": "weights are kept in fp32; precision.accumulate_allreduce_grads_in_fp32 and "
    "precision.grad_reduce_in_bf16 say the dtype of gradients",
    "gdp": "counts only in gated delta product layers, which no family has",
    "included": "special tokens are included unless --tokenizer-hf-no-include-special-tokens is given",
    "init": "each initial weight is drawn from the seed, the same for every layout",
    "kernels": "another implementation of the same computation; [kernels] and model.attention_backend choose",
    "legacy": "GPT's layers from before Megatron-Core are another implementation of the same computation",
    "memory": "how memory is reused changes no result",
    "modelopt": "a checkpoint of ModelOpt has its state beside the weights, which alone are read",
    "modelopt-names": "the pattern of layers says which model it is",
    "mhc-groups": "each connection is recomputed by itself, whatever the layers that are recomputed together",
    "models": "counts for models only that Megatron no longer has",
    "muon": "weights are always orthogonalized whole, whatever the tensor-parallel size",
    "noop": "Megatron ignores it, too, or it is always so",
    "norms": "norm weights are kept as they are, not less one, which computes the same",
    "offload": "all that recompute.offload_modules names waits in host memory, copied as it is computed",
    "profiler": "the steps of [profile] are recorded by torch's profiler, with the shapes of operands",
    "packs": "samples of a micro-batch in one sequence do not see one another: the same computation",
    "prompts": "records of data.data_path have the questions that are asked of their pictures",
    "quantile": "counts only with quantile_balancing, which is refused",
    "reads": "files of every format are recognized, read by any number of processes, and checked as a whole",
    "records": "metrics.jsonl and log.txt in the run directory are the records",
    "replay": "counts only in programs that replay the choices of routers",
    "restarts": "docs/guides/launching.md says how faults and restarts are handled",
    "rounding": "changes the order or dtype of a sum within a product; numerics.batch_invariant fixes it here",
    "samples": "the place in the data is in every checkpoint",
    "scaling": "scores are divided by the layer's number and multiplied back in fp32, which computes the same",
    "schedule": "the schedule is that of the configuration; a resumed run with another one is refused, and mt import "
    "CHECKPOINT translates that of a checkpoint",
    "serving": "for text generation, not for training",
    "signals": "SIGTERM and SIGINT always save and end the run",
    "small": "it is always saved, takes a few MB at most, and changes no result",
    "spec": "the layers of Megatron's own specs; model.family and [kernels] choose",
    "stragglers": "the waiting time of each rank is recorded; docs/guides/wrong-run.md finds a slow one by it",
    "tokenizer": "the tokenizer is always that of the configuration",
    "tokens": "the loss of a step is always the sum over its tokens, divided by their number",
    "tokens-stored": "indexed data holds ids, so that nothing is tokenized while training",
    "tp-overlap": "parallel.tp_comm_overlap overlaps what it can; how messages are split changes no result",
    "unrecorded": "mt does not record it; what is written beside a run changes none of its results",
    "weights": "fp32 weights are always taken from the checkpoint where it has them",
}


@dataclass(frozen=True)
class Argument:
    """A row of the table."""

    option: str
    dest: str
    takes: str
    choices: tuple[str, ...]
    default: Any
    default_0_12: Any
    versions: str
    outcome: Outcome
    keys: tuple[str, ...]
    reason: str
    group: str

    @property
    def spelled(self) -> str:
        return f"--{self.option}"

    @property
    def is_flag(self) -> bool:
        return self.takes in FLAGS

    @property
    def kind(self) -> str:
        """`takes` without how many."""
        return self.takes.rstrip("*+23")

    @property
    def count(self) -> str:
        """How many values: `*`, `+`, a number, or nothing for one."""
        return self.takes.removeprefix(self.kind)

    @property
    def why_without_effect(self) -> str:
        """The sentence of an argument whose outcome is none."""
        if self.reason.startswith(WITH):
            return f"counts only with --{self.reason.removeprefix(WITH)}, which is not done"
        return REASONS[self.reason]

    def default_of(self, version: Version) -> Any:
        return self.default_0_12 if version == "0.12" else self.default


@cache
def arguments() -> tuple[Argument, ...]:
    """All rows, in the order of Megatron's --help."""
    # Read at the first use, not when the module is imported.
    text = files("mt_import.megatron_arguments").joinpath("arguments.csv").read_text(encoding="utf-8")
    return tuple(_argument(row) for row in csv.DictReader(text.splitlines()))


@cache
def by_option() -> Mapping[str, Argument]:
    """Spelling with dashes -> argument, second spellings included."""
    by_spelling = {argument.spelled: argument for argument in arguments()}
    # Second: a row of its own wins over another row's alias.
    for argument in arguments():
        for spelling in _second_spellings(argument):
            by_spelling.setdefault(spelling, argument)
    return by_spelling


@cache
def by_dest() -> Mapping[str, Argument]:
    """Attribute -> the argument that sets it; of several that do the first."""
    table: dict[str, Argument] = {}
    for argument in arguments():
        table.setdefault(argument.dest, argument)
    return table


def defaults(version: Version) -> dict[str, Any]:
    """Attribute -> its value when nothing is given, of all versions' arguments."""
    return {dest: argument.default_of(version) for dest, argument in by_dest().items()}


def keys_with_options() -> dict[str, list[str]]:
    """Key -> the spellings that decide it."""
    spellings: dict[str, list[str]] = {}
    for argument in arguments():
        for key in argument.keys if argument.versions != "older" else ():
            spellings.setdefault(key, []).append(argument.spelled)
    return spellings


def explain_option(option: str) -> str | None:
    """What becomes of an option that decides no key; None: Megatron does not have it, or it decides one."""
    argument = by_option().get(option)
    if argument is None:
        return None
    if argument.outcome == "refused":
        return f"cannot be done: {argument.reason}"
    return f"no effect here: {argument.why_without_effect}" if argument.outcome == "none" else None


def _second_spellings(argument: Argument) -> Iterable[str]:
    """Aliases: of true defaults --no-x and --disable-x, of pairs --no-x."""
    name = argument.option
    if argument.takes == "pair":
        yield f"--no-{name}"
    if argument.takes == "false" and name.startswith("no-"):
        yield f"--disable-{name.removeprefix('no-')}"
    if argument.takes == "false" and name.startswith("disable-"):
        yield f"--no-{name.removeprefix('disable-')}"
    # These options have an underscore in their name; the spelling with a hyphen is accepted too.
    if "opt_param" in name:
        yield f"--{name.replace('_', '-')}"
    if name == "save-interval":
        yield "--persistent-save-interval"


def _argument(row: Mapping[str, str]) -> Argument:
    takes = row["takes"]
    default = _value(takes, row["default"])
    return Argument(
        option=row["option"],
        dest=row["dest"],
        takes=takes,
        choices=tuple(row["choices"].split("|")) if row["choices"] else (),
        default=default,
        default_0_12=_value(takes, row["default_0_12"]) if row["default_0_12"] else default,
        versions=row["versions"],
        outcome=row["outcome"],  # type: ignore[arg-type]
        keys=tuple(row["keys"].split()),
        reason=row["reason"],
        group=row["group"],
    )


def _value(takes: str, text: str) -> Any:
    if takes in FLAGS:
        return None if text == "none" else FLAGS[takes]
    if not text:
        return None
    kind = takes.rstrip("*+23")
    value = {"int": int, "float": float, "pattern": int}.get(kind, str)(text)
    # Several values: the default of one is a list of it.
    return [value] if takes != kind else value

"""Partitioning of layers into pipeline stages, balanced by cost or by Megatron's rules."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from mt_core.config.checks import SPLIT_KEYS
from mt_core.errors import ConfigError
from mt_core.parallel.pipeline.stage import Stage

if TYPE_CHECKING:
    from mt_core.config.parallel import ParallelConfig


def balanced_stages(
    num_layers: int, num_stages: int, *, embedding_cost: float = 0.0, output_cost: float = 0.0
) -> list[Stage]:
    """Stages that minimize the cost of the most expensive one, with the others as even as possible.

    Any number of layers over any number of stages; a stage may have none. Costs are in units of a layer: of the work
    before the layers in the first stage (embedding) and after them in the last (norm, LM head, loss).
    """
    loads = [0.0] * num_stages
    loads[0] += embedding_cost
    loads[-1] += output_cost
    # All layers cost the same, so assigning each to the cheapest stage so far is optimal.
    # Equal loads compare by stage, so that all ranks compute the same stages and earlier ones take what does not
    # divide.
    heap = [(load, stage) for stage, load in enumerate(loads)]
    heapq.heapify(heap)
    counts = [0] * num_stages
    for _ in range(num_layers):
        load, stage = heap[0]
        counts[stage] += 1
        heapq.heapreplace(heap, (load + 1.0, stage))
    return consecutive_stages(counts)


def consecutive_stages(counts: Sequence[int]) -> list[Stage]:
    """Consecutive stages with the given numbers of layers."""
    # counts 3, 2 -> layers 0 1 2 in the first stage, 3 4 in the second.
    stages, start = [], 0
    for number, count in enumerate(counts):
        stages.append(Stage(range(start, start + count), first=number == 0, last=number == len(counts) - 1))
        start += count
    return stages


def stages_by_keys(
    parallel: ParallelConfig, num_layers: int, stages_per_rank: int, placement: str
) -> list[Stage] | None:
    """The stages that SPLIT_KEYS define; None when none of them is set.

    Raises ConfigError when the keys cannot be satisfied, or conflict with another definition of the stages.
    """
    # None, False and 0 are the unset values of these keys.
    keys = {key: value for key in SPLIT_KEYS if (value := getattr(parallel, key))}
    if not keys:
        return None
    named = " and ".join(f"parallel.{key}" for key in keys)
    if parallel.pipeline_model_parallel_layout is not None:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_layout={parallel.pipeline_model_parallel_layout} says what each stage "
            f"holds; remove it or {named}"
        )
    if placement != "loop":
        raise ConfigError(
            f"parallel.pipeline_schedule={parallel.pipeline_schedule} puts the first and the last stage on one rank, "
            f"and {named} divides layers over ranks in order; use 1f1b, gpipe or interleaved_1f1b, or "
            "parallel.pipeline_model_parallel_layout"
        )
    return even_stages(num_layers, parallel.pipeline_model_parallel_size, stages_per_rank, **keys)


def even_stages(
    num_layers: int,
    num_ranks: int,
    stages_per_rank: int = 1,
    *,
    num_layers_in_first_pipeline_stage: int | None = None,
    num_layers_in_last_pipeline_stage: int | None = None,
    account_for_embedding_in_pipeline_split: bool = False,
    account_for_loss_in_pipeline_split: bool = False,
) -> list[Stage]:
    """Megatron's rule: the same number of layers on each rank, with the exceptions that the keys define.

    The first and last "pipeline stage" of the keys are ranks; their layers are split over their virtual stages like
    those of the others (placed in a loop). With account_for_..., embedding or loss count as one layer of their stage.
    Raises ConfigError, with the nearest valid numbers, when something is not divisible.
    """
    first, last = num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage
    counted = account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split
    if first is None and last is None:
        return _even(num_layers, num_ranks, stages_per_rank, *counted)
    if any(counted):
        raise ConfigError(
            "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split cannot go with "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage: give the numbers of layers, or "
            "let embedding and loss count as layers"
        )
    return _uneven(num_layers, num_ranks, stages_per_rank, first, last)


def _even(num_layers: int, num_ranks: int, stages_per_rank: int, embedding: bool, loss: bool) -> list[Stage]:
    extra, num_stages = embedding + loss, num_ranks * stages_per_rank
    each, rest = divmod(num_layers + extra, num_stages)
    # A stage without layers cannot give one up for the embedding or the loss.
    if rest or each < max(embedding, loss):
        # The next smaller and the next larger number of layers that divide.
        near = [number for number in (each * num_stages - extra, (each + 1) * num_stages - extra) if number > 0]
        counted = f" with {extra} for embedding or loss" if extra else ""
        raise ConfigError(
            f"model.num_layers={num_layers}{counted} does not divide evenly over {num_stages} pipeline stages "
            f"({num_ranks} ranks x {stages_per_rank}); it can be {' or '.join(map(str, near))}, or let the layers be "
            "balanced by cost, or give parallel.pipeline_model_parallel_layout"
        )
    counts = [each] * num_stages
    counts[0] -= embedding
    counts[-1] -= loss
    return consecutive_stages(counts)


def _uneven(num_layers: int, num_ranks: int, stages_per_rank: int, first: int | None, last: int | None) -> list[Stage]:
    # Ranks that have no number of their own share the remaining layers evenly.
    middle_ranks = num_ranks - (first is not None) - (last is not None)
    middle = num_layers - (first or 0) - (last or 0)
    if middle_ranks < 0:
        raise ConfigError(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need "
            f"parallel.pipeline_model_parallel_size to be 2 or more, not {num_ranks}"
        )
    if middle < 0 or (middle and not middle_ranks) or (middle_ranks and middle % middle_ranks):
        raise ConfigError(
            f"model.num_layers={num_layers} without num_layers_in_first_pipeline_stage={first} and "
            f"num_layers_in_last_pipeline_stage={last} leaves {middle} layers, which do not divide over the other "
            f"{middle_ranks} ranks; what is left can be {_multiples(middle_ranks)}"
        )
    of_rank = [middle // middle_ranks if middle_ranks else 0] * middle_ranks
    of_rank = ([] if first is None else [first]) + of_rank + ([] if last is None else [last])
    for rank, count in enumerate(of_rank):
        if count % stages_per_rank:
            raise ConfigError(
                f"{count} layers of pipeline rank {rank} do not divide over its "
                f"parallel.virtual_pipeline_model_parallel_size={stages_per_rank} stages; they can be "
                f"{_multiples(stages_per_rank)}"
            )
    # Stages are numbered round by round over the ranks (loop placement). 2 ranks with 4 and 2 layers, 2 stages each:
    # counts 2, 1, 2, 1 for stages 0 to 3, of which rank 0 holds 0 and 2.
    return consecutive_stages([count // stages_per_rank for count in of_rank] * stages_per_rank)


def _multiples(number: int) -> str:
    return f"{number}, {2 * number}, {3 * number}, ..." if number else "0"


# -- Megatron's `pipeline_model_parallel_layout`: what each stage holds, letter by letter ------------------
#
#     Et*3|(tt|)*29,m|L
#
# E is the embedding, t a layer, m a block of multi-token prediction, L the loss; | separates stages. `x*n` repeats x
# n times, where x may be a group in parentheses; groups may be nested. Commas and spaces are ignored. Stages are
# numbered in the order in which a micro-batch passes through them.

KEY = "parallel.pipeline_model_parallel_layout"
LETTERS = "EtmL|"


def stages_from_layout(layout: str, num_layers: int, num_stages: int, *, mtp_num_layers: int = 0) -> list[Stage]:
    """The stages of a layout string. Blocks of multi-token prediction are layers numbered on behind the others.

    Raises ConfigError, with the position in the string, for a syntax error or a layout that does not fit the model.
    """
    stages = "".join(expand(layout)).split("|")
    if len(stages) != num_stages:
        raise ConfigError(
            f"{KEY}={layout!r} has {len(stages)} stages, but pipeline_model_parallel_size x stages per rank is "
            f"{num_stages}; put {num_stages - 1} | between them"
        )
    _check_counts(layout, stages, {"t": num_layers, "m": mtp_num_layers, "E": 1, "L": 1})
    _check_sequence(layout, "".join(stages))
    _check_ends(layout, stages)
    return _numbered(stages)


def expand(layout: str) -> str:
    """The string with every repetition expanded: letters and | only. Raises ConfigError with the position."""
    return _Parser(layout).parse()


# Recursive descent over
#   sequence = (item | separator)*
#   item     = (letter | "(" sequence ")") ["*" number]
# `place` is the index of the next character, and that of the error when one is raised.
class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def parse(self) -> str:
        layout = self._sequence()
        if self.place < len(self.text):  # a sequence ends at a parenthesis that closes, or at the end
            raise self._error("this parenthesis closes none")
        return layout

    def _sequence(self) -> str:
        parts = []
        while self.place < len(self.text) and self.text[self.place] != ")":
            if self.text[self.place] in ", \t\n":
                self.place += 1
            else:
                parts.append(self._item())
        return "".join(parts)

    def _item(self) -> str:
        item = self._group() if self.text[self.place] == "(" else self._letter()
        return item * self._repetitions()

    def _group(self) -> str:
        opened = self.place
        self.place += 1
        sequence = self._sequence()
        if self.place == len(self.text):
            # Point at the parenthesis that was opened, not at the end of the string.
            self.place = opened
            raise self._error("this parenthesis is not closed")
        self.place += 1
        return sequence

    def _letter(self) -> str:
        letter = self.text[self.place]
        if letter == "*":
            raise self._error("* has to follow a letter, | or a group")
        if letter not in LETTERS:
            raise self._error(f"{letter!r} is none of E, t, m, L, |, parentheses and *")
        self.place += 1
        return letter

    def _repetitions(self) -> int:
        if not self.text.startswith("*", self.place):
            return 1
        self.place += 1
        start = self.place
        # str.isdigit would accept digits of other scripts and superscripts.
        while self.place < len(self.text) and self.text[self.place] in "0123456789":
            self.place += 1
        if self.place == start or int(self.text[start : self.place]) == 0:
            self.place = start
            raise self._error("a number from 1 has to follow *")
        return int(self.text[start : self.place])

    def _error(self, what: str) -> ConfigError:
        return ConfigError(
            f"{KEY}={self.text!r}, at position {self.place + 1} ({self.text[self.place :][:8]!r}): {what}"
        )


def _check_counts(layout: str, stages: Sequence[str], expected: dict[str, int]) -> None:
    counts = Counter("".join(stages))
    names = {"t": "t (layers)", "m": "m (blocks of multi-token prediction)", "E": "E (embedding)", "L": "L (loss)"}
    for letter, number in expected.items():
        if counts[letter] != number:
            raise ConfigError(f"{KEY}={layout!r} has {counts[letter]} {names[letter]}; this model needs {number}")


def _check_sequence(layout: str, letters: str) -> None:
    """Embedding, layers, prediction blocks and loss have to appear in this order."""
    # The stages are joined before the check, so that order is required across the boundaries too.
    for before, after in pairwise(letters):
        if "EtmL".index(before) > "EtmL".index(after):
            raise ConfigError(f"{KEY}={layout!r} has {before} before {after}; the sequence has to be E, t, m, L")


def _check_ends(layout: str, stages: Sequence[str]) -> None:
    # E and L occur once and in order, but may still be in a stage that is not the first or the last.
    for letter, number, name in (("E", 0, "first"), ("L", -1, "last")):
        if letter not in stages[number]:
            raise ConfigError(f"{KEY}={layout!r} has {letter} in another than the {name} stage; move it there")


def _numbered(stages: Sequence[str]) -> list[Stage]:
    result, start = [], 0
    for letters in stages:
        # Blocks of multi-token prediction are numbered as layers behind the last one.
        count = letters.count("t") + letters.count("m")
        result.append(Stage(range(start, start + count), first="E" in letters, last="L" in letters))
        start += count
    return result

"""Texts as the neighbours of a request to a RETRO, whose keys stand beside the prompt of a line.

`neighbors`: for each chunk of the prompt, from the first on, a list of texts. `passages`: texts that are neighbours of
every chunk, of what is generated too; the prompt is encoded and filled up to whole chunks as in instruction tuning
(retro_sft), whose prompts may have passages besides: here the prompt has what the line gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_core.errors import ConfigError, DataError
from mt_data.datasets.retro_sft.prompts import NeighborShape, filled_up, filler_of
from mt_data.datasets.retro_sft.records import passage_of
from mt_data.datasets.text_files import bare_encoder
from mt_infer.prompts import Prompt
from mt_infer.text import TextGenerator

NEIGHBORS, PASSAGES = "neighbors", "passages"
NAMES = ("neighbor_tokens", "neighbor_mask")
"""In the model's `conditioned_by`."""


def with_neighbors(
    generator: TextGenerator, prompt: Prompt, values: Mapping[str, Any], max_tokens: int | None
) -> tuple[Prompt, dict[str, Tensor]]:
    """The prompt of a line, and what the model takes beside it; of a model that reads no neighbours the prompt alone.

    Raises ConfigError for a line with both keys, or with something else than texts under one.
    """
    present = [key for key in (NEIGHBORS, PASSAGES) if key in values]
    if not present or NAMES[0] not in generator.prompts.conditioned_by:
        return prompt, {}
    if len(present) > 1:
        raise ConfigError(f'a line has either "{NEIGHBORS}" (of each chunk) or "{PASSAGES}" (of every chunk), not both')
    model = generator.config.model
    shape = NeighborShape(model.retro_chunk_length, model.retro_num_neighbors, model.retrieved_length)  # type: ignore[attr-defined]
    encode = bare_encoder(generator.tokenizer)
    if present == [NEIGHBORS]:
        # One (tokens [K, r], mask [K, r]) for each chunk.
        chunks = [shape.tokens(_texts(passages, NEIGHBORS), encode) for passages in _list(values[NEIGHBORS], NEIGHBORS)]
        return prompt, _inputs([tokens for tokens, _ in chunks], [mask for _, mask in chunks])
    filler = filler_of(generator.tokenizer, shape.chunk_length)
    # Instruction tuning encodes prompts without BOS.
    text = encode(prompt) if isinstance(prompt, str) else []
    ids = filled_up(text or generator.prompt_tokens(prompt), shape.chunk_length, filler)
    # Also of chunks that are still to be generated: neighbours are given once, with the request.
    positions = generator.longest if max_tokens is None else min(len(ids) + max_tokens, generator.longest)
    neighbors = shape.tokens(_texts(values[PASSAGES], PASSAGES), encode)
    return ids, _inputs(*[list(shape.of_every_chunk(part, positions)) for part in neighbors])


def _inputs(*parts: Sequence[NDArray[np.int64]]) -> dict[str, Tensor]:
    """Tokens and mask, [L] of [K, r] each -> [1, L, K, r]; nothing without chunks."""
    named = zip(NAMES, parts, strict=True)
    return {name: torch.from_numpy(np.stack(part))[None] for name, part in named if len(part)}


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f'"{key}" must be a list, and is {type(value).__name__}')
    return value


def _texts(value: Any, key: str) -> list[str]:
    try:
        return [passage_of(passage, f'"{key}", entry {number}') for number, passage in enumerate(_list(value, key), 1)]
    except DataError as error:
        raise ConfigError(str(error)) from error

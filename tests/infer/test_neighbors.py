"""Passages of a request as neighbours, against the ids by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mt_core.interfaces import SpecialTokens
from mt_infer.neighbors import with_neighbors

BOS, EOD = 1, 2


class StartingBytes:
    """Bytes behind three special ids; BOS is put before each text, as Llama's tokenizers do."""

    special = SpecialTokens(bos=BOS, eod=EOD)

    def encode(self, text: str) -> list[int]:
        return [BOS, *(byte + 3 for byte in text.encode())]


@pytest.fixture
def generator() -> SimpleNamespace:
    tokenizer = StartingBytes()
    model = SimpleNamespace(retro_chunk_length=4, retro_num_neighbors=1, retrieved_length=3)
    return SimpleNamespace(
        tokenizer=tokenizer,
        config=SimpleNamespace(model=model),
        prompts=SimpleNamespace(conditioned_by=("neighbor_tokens", "neighbor_mask")),
        prompt_tokens=lambda prompt: tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt),
        longest=16,
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [EOD, EOD, 100, 101]), ("", [EOD, EOD, EOD, BOS]), ([BOS, 100], [EOD, EOD, BOS, 100])],
)
def test_a_prompt_with_passages_is_that_of_instruction_tuning(generator, prompt, expected) -> None:
    """Without BOS before a text, as retro_sft encodes it; ids are left as they are."""
    ids, inputs = with_neighbors(generator, prompt, {"passages": ["c"]}, 4)
    assert ids == expected
    assert inputs["neighbor_tokens"].tolist() == [[[[102, 0, 0]], [[102, 0, 0]]]]


def test_neighbours_reach_no_further_than_sequences(generator) -> None:
    _, inputs = with_neighbors(generator, "ab", {"passages": ["c"]}, 10**14)
    assert inputs["neighbor_mask"].shape == (1, 4, 1, 3)

"""Tokens in whose place media would be: which of a file there are, and as what they are embedded."""

from __future__ import annotations

import pytest
import torch
from tests.models.published_configs import KIMI_K25

from mt_models.blocks.decoder import without_placeholders
from mt_models.blocks.hugging_face_tower import import_placeholders
from mt_models.blocks.placeholder_config import PlaceholderKeys
from mt_models.deepseek.hugging_face import HUGGING_FACE as DEEPSEEK
from mt_models.gemma4.hugging_face import HUGGING_FACE as GEMMA4

DEFAULTS = {"image_token_id": 9, "video_token_id": 12}


def test_they_are_embedded_as_the_token_of_padding() -> None:
    keys = PlaceholderKeys(placeholder_token_ids=[4, 7], placeholder_embedding_id=2)
    assert without_placeholders(torch.tensor([[4, 1, 7], [5, 4, 0]]), keys).tolist() == [[2, 1, 2], [5, 2, 0]]


@pytest.mark.parametrize(
    ("external", "tokens"),
    [
        ({}, [9]),  # 12 is beyond the vocabulary of 10
        ({"video_token_id": 3}, [3, 9]),
        ({"image_token_id": 3, "video_token_id": 3}, [3]),
        ({"image_token_id": None}, []),
        ({"image_token_id": -1}, []),
    ],
)
def test_those_of_a_file_are_within_its_vocabulary(external, tokens) -> None:
    keys = import_placeholders(external, DEFAULTS, vocab_size=10, padding=2)
    assert keys == ({"placeholder_token_ids": tokens, "placeholder_embedding_id": 2} if tokens else {})


def test_the_published_ones_of_gemma4() -> None:
    keys = GEMMA4.read_config({"model_type": "gemma4", "text_config": {"pad_token_id": 5}})
    assert keys["placeholder_token_ids"] == [258880, 258881, 258884]
    assert keys["placeholder_embedding_id"] == 5


@pytest.mark.parametrize("name", ["image_token_id", "media_placeholder_token_id"])
def test_those_of_kimi_k25_under_both_names(name: str) -> None:
    external = {key: value for key, value in KIMI_K25.items() if key != "media_placeholder_token_id"}
    assert DEEPSEEK.read_config({**external, name: 163600})["placeholder_token_ids"] == [163600]


def test_a_decoder_without_towers_has_none() -> None:
    assert "placeholder_token_ids" not in GEMMA4.read_config({"model_type": "gemma4_text"})

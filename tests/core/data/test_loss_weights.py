"""Weights of positions and the divisor of the loss, by cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mt_core.config.loading import load_config
from mt_core.data.loss_weights import LossCounts, LossNormalization
from mt_core.errors import ConfigError, DataError

MASK = np.array([[1.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 6.0]], dtype=np.float32)
SEGMENTS = np.array([[0, 0, 1, 1], [0, 0, 0, 0], [3, 3, 3, 3]])


@pytest.mark.parametrize(
    ("kind", "divisor", "weights"),
    [
        ("weights", 10.0, MASK),
        ("tokens", 5.0, MASK),
        ("sequences", 2.0, [[0.5, 0, 0.25, 0.25], [0, 0, 0, 0], [0.25, 0, 0, 0.75]]),
    ],
)
def test_rows_are_sequences(kind: str, divisor: float, weights) -> None:
    arrays = {"tokens": np.zeros((3, 4)), "loss_mask": MASK}
    normalization = LossNormalization(kind)
    assert normalization.counts([arrays, arrays]) == LossCounts(2 * divisor, 10.0)
    assert normalization.weigh(arrays)["loss_mask"].tolist() == np.array(weights).tolist()


def test_segments_are_sequences_where_the_data_set_gives_them() -> None:
    arrays = {"loss_mask": MASK, "segment_ids": SEGMENTS}
    normalization = LossNormalization("sequences")
    assert normalization.counts([arrays]) == LossCounts(3.0, 5.0)
    assert normalization.weigh(arrays)["loss_mask"].tolist() == [[1, 0, 0.5, 0.5], [0, 0, 0, 0], [0.25, 0, 0, 0.75]]


@pytest.mark.parametrize("kind", ["weights", "tokens"])
def test_tokens_of_texts_that_one_position_stands_for_are_counted_apart(kind: str) -> None:
    """A pair of texts has one loss; a row without weight fills up a batch."""
    tokens = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.float32)
    arrays = {"loss_mask": np.array([[0, 1, 0, 0], [0, 0, 0, 0]], np.float32), "token_mask": tokens}
    assert LossNormalization(kind).counts([arrays]) == LossCounts(1.0, 3.0)


def test_samples_with_one_loss_each_are_sequences() -> None:
    arrays = {"loss_mask": np.array([2.0, 0.0, 0.5], dtype=np.float32)}
    assert LossNormalization("sequences").counts([arrays]) == LossCounts(2.0, 2.0)
    assert LossNormalization("sequences").weigh(arrays)["loss_mask"].tolist() == [1, 0, 1]


def test_every_rank_gives_its_part_of_a_constant() -> None:
    assert LossNormalization("constant", 6.0, ranks=3).counts([{"loss_mask": MASK}]) == LossCounts(2.0, 5.0)
    assert LossNormalization("constant", 6.0, ranks=3).counts([]) == LossCounts(2.0, 0.0)


def test_samples_without_weights_have_weight_one() -> None:
    arrays = {"x": np.zeros((4, 2))}
    assert LossNormalization("weights").weigh(arrays)["loss_mask"].tolist() == [1, 1, 1, 1]
    assert LossNormalization("weights").counts([arrays]) == LossCounts(4.0, 4.0)


@pytest.mark.parametrize("wrong", [-0.5, np.nan, np.inf])
def test_other_weights_are_refused_with_their_value(wrong: float) -> None:
    with pytest.raises(DataError, match=rf"loss_mask has {wrong}; it is the weight"):
        LossNormalization().weigh({"loss_mask": np.array([[1.0, wrong]])})


def test_a_constant_needs_its_key() -> None:
    with pytest.raises(ConfigError, match=r"train.loss_divisor; set it to a number above 0"):
        load_config(preset="gpt-tiny", overrides=["train.loss_normalization=constant"])
    with pytest.raises(ConfigError, match=r"train.loss_divisor"):
        load_config(preset="gpt-tiny", overrides=["train.loss_divisor=2.0"])

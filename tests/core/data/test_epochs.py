"""train.train_epochs: every sample once an epoch, in another order each time, without an incomplete last batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mt_core.config.loading import load_config
from mt_core.data import building
from mt_core.data.training_length import EpochDataset, with_train_iters
from mt_core.errors import ConfigError, DataError
from mt_core.train.engine import Engine

SETTINGS = ["train.train_iters=null", "train.train_epochs=3", "train.global_batch_size=4", "train.micro_batch_size=2"]


class Numbered:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"uid": np.array(index)}

    def describe(self, index: int) -> str:
        return f"line {index}"


def load(*settings: str):
    return load_config(preset="gpt-tiny", overrides=[*SETTINGS, *settings])


def config_of(*settings: str):
    return load(*settings).config


def test_epochs_are_shuffled_by_their_number_and_drop_what_is_no_batch() -> None:
    config = with_train_iters(config_of(), len(Numbered()))
    assert config.train.train_iters == 3 * (11 // 4)
    dataset = building.in_epochs(Numbered(), config)
    assert len(dataset) == 24
    uids = [int(dataset[k]["uid"]) for k in range(24)]
    epochs = [uids[start : start + 8] for start in (0, 8, 16)]
    assert all(max(Counter(epoch).values()) == 1 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Epoch 1 is the first of a run whose seed is larger by 1.
    later = EpochDataset(Numbered(), 1, 8, config.train.seed + 1)
    assert [int(later[k]["uid"]) for k in range(8)] == epochs[1]
    assert dataset.describe(8) == f"line {epochs[1][0]}"
    with pytest.raises(IndexError, match="sample 24 of 3 epochs that have 24"):
        dataset[24]


class Blend(Numbered):
    """The even samples are of one data set, the odd ones of another."""

    names, weights, datasets = ("even", "odd"), (0.5, 0.5), ((), ())

    def place(self, index: int) -> tuple[int, int]:
        return index % 2, index // 2

    def counts(self, first: int, stop: int) -> list[int]:
        raise AssertionError("an epoch has another order")


def test_epochs_of_a_blend_count_what_is_drawn_of_each() -> None:
    dataset = building.in_epochs(Blend(), with_train_iters(config_of(), 11))
    odd = [int(dataset[k]["uid"]) % 2 for k in range(24)]
    assert dataset.counts(0, 24) == [24 - sum(odd), sum(odd)]
    assert dataset.counts(5, 11) == [6 - sum(odd[5:11]), sum(odd[5:11])]
    assert dataset.names == ("even", "odd")


def test_lengths_that_do_not_agree() -> None:
    with pytest.raises(DataError, match="has 3 samples, fewer than a global batch of 4"):
        with_train_iters(config_of(), 3)
    with pytest.raises(ConfigError, match=r"train\.train_iters=9, and train\.train_epochs=3 epochs of 2 steps are 6"):
        with_train_iters(config_of("train.train_iters=9"), 11)
    assert with_train_iters(config_of("train.train_iters=6"), 11).train.train_iters == 6
    with pytest.raises(ConfigError, match=r"set exactly one of .*train_samples and train_epochs are set"):
        config_of("train.train_samples=9")


def test_the_warmup_is_compared_with_the_steps_that_epochs_have() -> None:
    loaded = load("data.corpus_bytes=1000000", "lr_schedule.lr_warmup_iters=100000")
    with pytest.raises(ConfigError, match=r"lr_warmup_iters=100000 leaves nothing of the run, train\.train_iters=\d+;"):
        Engine.build(loaded)

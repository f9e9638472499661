"""Copies of batches run on a stream of their own, a step ahead; shown by streams that only write down what they do."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from mt_core.data.loader import RankBatch
from mt_core.data.loss_weights import LossNormalization
from mt_core.parallel.context import Axis
from mt_core.train.step.batches import FIRST_SAMPLE, DeviceBatches, micro_batches


def rank_batch(number: int) -> RankBatch:
    arrays = [{"tokens": np.full((2, 8), number * 10 + micro)} for micro in range(2)]
    return RankBatch(arrays, [range(number * 4, number * 4 + 2), range(number * 4 + 2, number * 4 + 4)])


def numbers(batches) -> list[int]:
    return [int(batch["tokens"][0, 0]) for batch in batches]


def test_on_a_cpu_nothing_is_read_ahead() -> None:
    read: list[int] = []

    def reading():
        for number in range(3):
            read.append(number)
            yield rank_batch(number)

    device = DeviceBatches(torch.device("cpu"), Axis())
    for number, batch in enumerate(device.ahead(reading())):
        assert read == list(range(number + 1))
        assert numbers(device.take(batch)) == [number * 10, number * 10 + 1]


def test_micro_batches_know_their_first_sample_and_have_their_ranks_tokens() -> None:
    batch = RankBatch([{"tokens": np.arange(8)[None]}], [range(6, 7)])
    (own,) = micro_batches(batch, Axis(2, 1, None, (0, 1)), LossNormalization())
    assert own["tokens"].tolist() == [[2, 3, 4, 5]]  # chunks 1 and 2 of 4
    assert int(own[FIRST_SAMPLE]) == 6


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"arrived on {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for what {event}")


class OnGpu:
    """A tensor that says that it is on a GPU, and writes down which stream uses it."""

    device = torch.device("cuda")

    def __init__(self, tensor: torch.Tensor, log: list[str]) -> None:
        self.tensor, self.log = tensor, log

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"used on {stream.name}")

    def __getitem__(self, place):
        return self.tensor[place]


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What streams are asked, in order."""
    written: list[str] = []
    current = [FakeStream(written, "computing")]

    @contextmanager
    def within(stream):
        current.append(stream)
        yield
        current.pop()

    def copy(self, tensor):
        written.append(f"copy of {int(tensor.flatten()[0])} on {current[-1].name}")
        return OnGpu(tensor, written)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(written, "copying"))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(DeviceBatches, "_copy", copy)
    return written


def test_the_next_batch_is_on_its_way_before_a_step_begins(log) -> None:
    device = DeviceBatches(torch.device("cuda"), Axis())
    for number, batch in enumerate(device.ahead(rank_batch(number) for number in range(3))):
        log.append(f"step {number}")
        assert numbers(device.take(batch)) == [number * 10, number * 10 + 1]
    copied = {text: place for place, text in enumerate(log)}
    assert copied["copy of 10 on copying"] < copied["step 0"]
    assert copied["copy of 20 on copying"] < copied["step 1"]
    assert copied["step 0"] < copied["copy of 20 on copying"]
    assert not device._on_the_way


def test_the_computing_stream_waits_for_the_copies_and_keeps_their_memory(log) -> None:
    device = DeviceBatches(torch.device("cuda"), Axis())
    device.take(rank_batch(1))
    assert log == [
        "copy of 10 on copying",
        "copy of 1 on copying",  # the weights of the losses
        "copy of 11 on copying",
        "copy of 1 on copying",
        "copying records",
        "computing waits for what arrived on copying",
        *("used on computing",) * 4,
    ]


def test_the_number_of_the_first_sample_stays_on_the_host(log) -> None:
    (first, _) = DeviceBatches(torch.device("cuda"), Axis()).take(rank_batch(1))
    assert isinstance(first[FIRST_SAMPLE], torch.Tensor)
    assert first[FIRST_SAMPLE].device.type == "cpu"

"""What a timeline tells, and what is written of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest
import torch

from mt_core.errors import ConfigError
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.parallel.pipeline.schedule_tables import Action, Kind
from mt_core.parallel.pipeline.schedules import ZBV_ZERO_BUBBLE
from mt_core.parallel.pipeline.timeline import COLOURS, Span, StageTimes, Timeline, simulate
from mt_core.parallel.pipeline.trace import ScheduleRecorder, read_trace, write_trace
from mt_core.train.pipelining import ScheduleTrace

TIMELINE = Timeline(
    (
        (Span(Action(Kind.FORWARD, 0, 0), 1.0, 2.0), Span(Action(Kind.SEND_FORWARD, 0, 0), 2.0, 2.1)),
        (Span(Action(Kind.RECEIVE_FORWARD, 1, 0), 0.0, 2.5), Span(Action(Kind.FORWARD, 1, 0), 2.5, 4.0)),
    )
)


def test_only_computation_counts_as_busy() -> None:
    assert TIMELINE.makespan == 3.0
    assert [TIMELINE.busy(0), TIMELINE.busy(1)] == [1.0, 1.5]
    assert TIMELINE.bubble_fraction == pytest.approx(3.5 / 6)
    assert TIMELINE.bubble_ratio == pytest.approx(3.5 / 2.5)
    assert Timeline(((), ())).bubble_fraction == 0.0


def test_a_chrome_trace_is_read_back(tmp_path) -> None:
    write_trace(TIMELINE, tmp_path / "schedule.json")
    back = read_trace(tmp_path / "schedule.json")
    assert [[span.action for span in rank] for rank in back.ranks] == [
        [span.action for span in rank] for rank in TIMELINE.ranks
    ]
    assert back.makespan == pytest.approx(3.0)
    content = json.loads((tmp_path / "schedule.json").read_text())
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert {"name": "1F0", "cat": "F", "pid": 1, "ts": 2.5e6, "dur": 1.5e6}.items() <= events[-1].items()
    assert content["otherData"]["bubble_fraction"] == pytest.approx(3.5 / 6)


def test_the_second_step_of_a_run_is_the_traced_one(tmp_path) -> None:
    """The first one includes warm-up."""
    trace, notes, written = ScheduleTrace(tmp_path / "schedule.json", ParallelContext()), [], []

    def step(number: int) -> int:
        with trace.recorder.span(Action(Kind.FORWARD, 0, number)):
            return number

    for number in range(3):
        pending, note = trace.run(partial(step, number), 11 + number)
        assert pending == number
        notes.append(note)
        written.append(trace.path.exists())
    assert notes == [None, f"schedule of step 12 written to {trace.path}", None]
    assert written == [False, True, True]
    assert [span.action for span in read_trace(trace.path).ranks[0]] == [Action(Kind.FORWARD, 0, 1)]


def test_a_picture_has_a_row_for_each_rank_and_a_box_for_each_action(tmp_path) -> None:
    timeline = simulate(ZBV_ZERO_BUBBLE, 3, 5, StageTimes.even(6, 1.0, 2.0))
    write_trace(timeline, tmp_path / "schedule.svg")
    svg = ElementTree.parse(tmp_path / "schedule.svg").getroot()
    boxes = [box for box in svg.iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    assert len(boxes) == sum(map(len, timeline.ranks))
    assert len({box.get("y") for box in boxes}) == 3
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        expected = sum(span.action.kind is kind for rank in timeline.ranks for span in rank)
        assert sum(box.get("fill") == COLOURS[kind] for box in boxes) == expected
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 1", "rank 2", "0", "4"} <= set(texts)
    # Boxes of a row do not overlap, and the last ends at the right edge of the picture.
    for y in {box.get("y") for box in boxes}:
        row = sorted((float(box.get("x")), float(box.get("width"))) for box in boxes if box.get("y") == y)
        assert all(x + width <= after + 0.02 for (x, width), (after, _) in zip(row, row[1:], strict=False))


def test_an_unknown_ending_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"\.json .*\.svg .*'schedule\.png'"):
        write_trace(TIMELINE, tmp_path / "schedule.png")


def test_a_recorder_forgets_the_step_before() -> None:
    recorder, axis = ScheduleRecorder(torch.device("cpu")), Axis()
    for number in range(2):
        recorder.begin(axis)
        with recorder.span(Action(Kind.FORWARD, 0, number)):
            pass
    (span,) = recorder.gather(axis).ranks[0]
    assert span.action == Action(Kind.FORWARD, 0, 1)
    assert 0.0 <= span.start <= span.end

"""Orders of schedules, sends and receives put into them, and the simulator against closed forms and hand work."""

from __future__ import annotations

from collections import Counter

import pytest

from mt_core.config.parallel import ParallelConfig
from mt_core.errors import ConfigError, PluginError
from mt_core.parallel.pipeline.schedule_tables import Action, Kind, forward_only, ranks_of_stages, with_communication
from mt_core.parallel.pipeline.schedules import PipelineSchedule, configured_schedule, rank_actions
from mt_core.parallel.pipeline.timeline import StageTimes, simulate
from mt_core.plugins import load_plugins
from mt_core.specs import PIPELINE_SCHEDULES

SCHEDULES: dict[str, PipelineSchedule] = {
    spec.name: spec.schedule.load() for spec in load_plugins()[PIPELINE_SCHEDULES]
}

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipe_v", 2),
]
SHAPES = [(1, 3), (2, 1), (2, 5), (3, 2), (4, 3), (4, 4), (4, 7), (4, 9), (5, 13)]
"""(ranks, micro-batches): fewer than ranks, fewer than stages, no multiples."""


@pytest.mark.parametrize(("name", "each"), CASES)
def test_every_order_does_all_of_the_work_once_for_any_number_of_micro_batches(name, each) -> None:
    for ranks, count in SHAPES:
        schedule = SCHEDULES[name]
        order = schedule.order(ranks, ranks * each, count)
        owners = ranks_of_stages(ranks * each, ranks, schedule.placement)
        places = {(stage, number) for stage in range(ranks * each) for number in range(count)}
        done: dict[Kind, list[tuple[int, int]]] = {kind: [] for kind in Kind}
        for rank, actions in enumerate(order):
            for action in actions:
                assert owners[action.stage] == rank
                done[action.kind].append((action.stage, action.micro_batch))
        assert Counter(done[Kind.FORWARD]) == Counter(places)
        assert Counter(done[Kind.BACKWARD] + done[Kind.BACKWARD_INPUT]) == Counter(places)
        assert Counter(done[Kind.BACKWARD_INPUT]) == Counter(done[Kind.BACKWARD_WEIGHT])
        assert bool(done[Kind.BACKWARD_WEIGHT]) <= schedule.splits_backward


@pytest.mark.parametrize(("name", "each"), CASES)
@pytest.mark.parametrize("training", [True, False])
def test_transfers_meet_even_if_each_blocks_both_ranks(name, each, training) -> None:
    """The strictest transport: a rank goes on only when its next send or receive is also the next of its peer."""
    for ranks, count in SHAPES:
        schedule = SCHEDULES[name]
        owners = ranks_of_stages(ranks * each, ranks, schedule.placement)
        order = schedule.order(ranks, ranks * each, count)
        planned = with_communication(order if training else forward_only(order), owners)
        crossings = sum(a != b for a, b in zip(owners, owners[1:], strict=False)) * count
        kinds = Counter(action.kind for actions in planned for action in actions)
        assert kinds[Kind.SEND_FORWARD] == kinds[Kind.RECEIVE_FORWARD] == crossings
        assert kinds[Kind.SEND_BACKWARD] == kinds[Kind.RECEIVE_BACKWARD] == (crossings if training else 0)
        replay(planned, owners)


def replay(planned: list[list[Action]], owners: tuple[int, ...]) -> None:
    """Run to the end with blocking transfers; every action finds what it needs on its rank."""
    num_stages = len(owners)
    rest = [list(reversed(actions)) for actions in planned]
    have: set[tuple[str, int, int]] = set()
    while any(rest):
        progress = False
        for own in rest:
            while own and own[-1].kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                kind, stage, number = own.pop()
                progress = True
                if kind is Kind.FORWARD:
                    assert stage == 0 or ("hidden", stage, number) in have
                    have.add(("made", stage, number))
                    if stage + 1 < num_stages and owners[stage + 1] == owners[stage]:
                        have.add(("hidden", stage + 1, number))
                elif kind is Kind.BACKWARD_WEIGHT:
                    assert ("back", stage, number) in have
                else:
                    assert ("made", stage, number) in have
                    assert stage == num_stages - 1 or ("gradient", stage, number) in have
                    have.add(("back", stage, number))
                    if stage > 0 and owners[stage - 1] == owners[stage]:
                        have.add(("gradient", stage - 1, number))
        for own in rest:
            if not own or own[-1].kind not in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                continue
            kind, stage, number = own[-1]
            forward = kind is Kind.SEND_FORWARD
            reader = stage + 1 if forward else stage - 1
            wanted = Action(Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD, reader, number)
            peer = rest[owners[reader]]
            if peer and peer[-1] == wanted:
                assert ("made" if forward else "back", stage, number) in have
                have.add(("hidden" if forward else "gradient", reader, number))
                own.pop()
                peer.pop()
                progress = True
        assert progress, [own[-1] for own in rest if own]


def test_an_order_that_waits_in_a_circle_is_refused() -> None:
    order = [
        [Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)],
        [Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 1, 0)],
    ]
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait"):
        with_communication(order, (0, 1))


def test_1f1b_holds_no_more_micro_batches_than_there_are_stages_behind() -> None:
    for rank, actions in enumerate(SCHEDULES["1f1b"].order(4, 4, 9)):
        held = most = 0
        for action in actions:
            held += 1 if action.kind is Kind.FORWARD else -1
            most = max(most, held)
        assert most == 4 - rank


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 8), (16, 64)])
def test_bubbles_are_those_of_the_closed_forms(ranks, count) -> None:
    """Narayanan et al., 2021: (p - 1) / m, and (p - 1) / (v m) with v stages a rank, whatever the costs."""
    for forward, backward in ((1.0, 2.0), (0.7, 1.1)):
        single = StageTimes.even(ranks, forward, backward)
        for name in ("gpipe", "1f1b"):
            timeline = simulate(SCHEDULES[name], ranks, count, single)
            assert timeline.bubble_ratio == pytest.approx((ranks - 1) / count)
            assert timeline.makespan == pytest.approx((count + ranks - 1) * (forward + backward))
        for each in (2, 3):
            timeline = simulate(
                SCHEDULES["interleaved_1f1b"], ranks, count, StageTimes.even(each * ranks, forward, backward)
            )
            assert timeline.bubble_ratio == pytest.approx((ranks - 1) / (each * count))


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 32)])
def test_bubbles_of_zero_bubble_schedules(ranks, count) -> None:
    """Qi et al., 2023: ZB-H1 idles (p - 1) (F + I - W); where the three cost alike, ZB-V idles half of it."""
    for forward, inputs, weights in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8)):
        times = StageTimes([forward] * ranks, [inputs] * ranks, [weights] * ranks)
        idle = simulate(SCHEDULES["interleaved_zero_bubble"], ranks, count, times).makespan - count * (
            forward + inputs + weights
        )
        assert idle == pytest.approx((ranks - 1) * (forward + inputs - weights))
    whole = simulate(SCHEDULES["zbv_zero_bubble"], ranks, count, StageTimes.even(2 * ranks, 1.0, 2.0)).makespan
    assert whole - count * 6.0 == pytest.approx(ranks - 1)


def test_a_case_worked_out_by_hand() -> None:
    """1F1B, two ranks, F = 1, B = 2, transfers take 0.5. Rank 0: F0 0-1, F1 1-2, B0 5-7, B1 8-10. Rank 1: F0 1.5-2.5,
    B0 2.5-4.5, F1 4.5-5.5, B1 5.5-7.5."""
    timeline = simulate(SCHEDULES["1f1b"], 2, 2, StageTimes.even(2, 1.0, 2.0, transfer=0.5))
    found = [[(str(span.action.kind), span.action.micro_batch, span.start) for span in rank] for rank in timeline.ranks]
    assert found == [
        [("F", 0, 0.0), ("F", 1, 1.0), ("B", 0, 5.0), ("B", 1, 8.0)],
        [("F", 0, 1.5), ("B", 0, 2.5), ("F", 1, 4.5), ("B", 1, 5.5)],
    ]
    assert timeline.makespan == 10.0
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 20)


def test_the_slowest_stage_sets_the_pace() -> None:
    times = StageTimes([1.0, 3.0, 1.0], [1.0, 3.0, 1.0], [1.0, 3.0, 1.0])
    assert simulate(SCHEDULES["1f1b"], 3, 100, times).makespan == pytest.approx(100 * 9.0, rel=0.02)


def test_transfers_between_stages_of_one_rank_take_no_time() -> None:
    quick = simulate(SCHEDULES["zbv_zero_bubble"], 1, 4, StageTimes.even(2, 1.0, 2.0))
    assert (
        simulate(SCHEDULES["zbv_zero_bubble"], 1, 4, StageTimes.even(2, 1.0, 2.0, transfer=9.0)).makespan
        == quick.makespan
    )


def test_ranks_get_their_own_actions() -> None:
    assert rank_actions(SCHEDULES["gpipe"], 2, 2, 1, 1, training=True) == (
        Action(Kind.RECEIVE_FORWARD, 1, 0),
        Action(Kind.FORWARD, 1, 0),
        Action(Kind.BACKWARD, 1, 0),
        Action(Kind.SEND_BACKWARD, 1, 0),
    )


@pytest.mark.parametrize(
    ("name", "stages", "words"),
    [
        ("1f1b", 8, ["1f1b", "8 stages", "pipeline_model_parallel_size=4", "4 stages (1 a rank)"]),
        ("interleaved_1f1b", 4, ["2 or more on each rank", "8, 12, 16"]),
        ("interleaved_zero_bubble", 6, ["1 or more on each rank", "4, 8, 12"]),
        ("dualpipe_v", 12, ["8 stages (2 a rank)"]),
    ],
)
def test_stages_that_do_not_fit_a_schedule_are_refused(name, stages, words) -> None:
    with pytest.raises(ConfigError) as caught:
        SCHEDULES[name].order(4, stages, 8)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_unknown_schedule_is_refused_with_the_names() -> None:
    unknown = ParallelConfig(pipeline_schedule="1f1")
    with pytest.raises(
        PluginError, match='pipeline_schedule=1f1 needs a pipeline schedule.*did you mean "1f1b"'
    ) as caught:
        configured_schedule(unknown, load_plugins())
    assert all(name in str(caught.value) for name in SCHEDULES)

"""Layers over stages: by cost, by Megatron's rules, and by a layout string."""

from __future__ import annotations

import itertools

import pytest

from mt_core.errors import ConfigError
from mt_core.parallel.pipeline.partition import balanced_stages, even_stages, expand, stages_from_layout
from mt_core.parallel.pipeline.schedule_tables import ranks_of_stages, stages_of_rank
from mt_core.parallel.pipeline.stage import Stage


def counts(stages: list[Stage]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def check_whole(stages: list[Stage], num_layers: int) -> None:
    """Every layer once and in order; the ends at the ends."""
    assert [number for stage in stages for number in stage.layers] == list(range(num_layers))
    assert [stage.first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]


@pytest.mark.parametrize("num_layers", [0, 1, 3, 8, 13])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize(("embedding", "output"), [(0, 0), (1, 1), (0.3, 2.5)])
def test_no_other_division_has_a_cheaper_costliest_stage(num_layers, num_stages, embedding, output) -> None:
    stages = balanced_stages(num_layers, num_stages, embedding_cost=embedding, output_cost=output)
    check_whole(stages, num_layers)
    ours = costliest(counts(stages), embedding, output)
    cuts = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
    others = [[end - start for start, end in itertools.pairwise((0, *some, num_layers))] for some in cuts]
    assert ours == pytest.approx(min(costliest(other, embedding, output) for other in others))


def costliest(layers: list[int], embedding: float, output: float) -> float:
    costs = [float(count) for count in layers]
    costs[0] += embedding
    costs[-1] += output
    return max(costs)


def test_stages_that_cost_alike_are_even() -> None:
    assert counts(balanced_stages(10, 4)) == [3, 3, 2, 2]
    assert counts(balanced_stages(30, 4, embedding_cost=1, output_cost=3)) == [8, 9, 8, 5]
    assert counts(balanced_stages(2, 4)) == [1, 1, 0, 0]


def test_megatrons_even_rule() -> None:
    assert counts(even_stages(12, 2, 3)) == [2] * 6
    both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert counts(even_stages(14, 4, **both)) == [3, 4, 4, 3]
    assert counts(even_stages(14, 2, 4, **both)) == [1, 2, 2, 2, 2, 2, 2, 1]
    check_whole(even_stages(14, 2, 4, **both), 14)


def test_megatrons_uneven_ends_are_ranks_of_several_stages() -> None:
    """Rank 0 has 2 layers, rank 3 has 4 and the others 6; each divides its own over two rounds."""
    ends = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 4}
    assert counts(even_stages(18, 4, **ends)) == [2, 6, 6, 4]
    assert counts(even_stages(18, 4, 2, **ends)) == [1, 3, 3, 2, 1, 3, 3, 2]
    assert counts(even_stages(7, 2, num_layers_in_last_pipeline_stage=2)) == [5, 2]
    assert counts(even_stages(7, 2, num_layers_in_first_pipeline_stage=3, num_layers_in_last_pipeline_stage=4)) == [
        3,
        4,
    ]


@pytest.mark.parametrize(
    ("arguments", "keys", "words"),
    [
        ((10, 4), {}, ["num_layers=10", "4 pipeline stages", "8 or 12"]),
        ((12, 4), {"account_for_loss_in_pipeline_split": True}, ["num_layers=12 with 1", "11 or 15"]),
        ((12, 4), {"num_layers_in_first_pipeline_stage": 2}, ["leaves 10 layers", "3 ranks", "3, 6, 9"]),
        ((12, 2, 4), {"num_layers_in_first_pipeline_stage": 6}, ["6 layers of pipeline rank 0", "4, 8, 12"]),
        ((4, 1), {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2}, ["2 or more"]),
        (
            (12, 4),
            {"num_layers_in_first_pipeline_stage": 3, "account_for_loss_in_pipeline_split": True},
            ["cannot go with"],
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(arguments, keys, words) -> None:
    with pytest.raises(ConfigError) as caught:
        even_stages(*arguments, **keys)
    assert all(word in str(caught.value) for word in words), caught.value


def test_layout_strings() -> None:
    assert expand("Et*3|(tt|)*2, m|L") == "Ettt|tt|tt|m|L"
    assert expand("E(t|(tt|)*2)*2L") == "Et|tt|tt|t|tt|tt|L"
    assert expand("E|*3 L") == "E|||L"
    stages = stages_from_layout("Et*3|(tt|)*2,|L", 7, 5)
    assert counts(stages) == [3, 2, 2, 0, 0]
    check_whole(stages, 7)
    with_prediction = stages_from_layout("Ett|t,m|L", 3, 3, mtp_num_layers=1)
    assert [stage.layers for stage in with_prediction] == [range(2), range(2, 4), range(4, 4)]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("Ettx|tL", ["position 4", "'x'"]),
        ("E(tt|tL", ["position 2", "not closed"]),
        ("Ett)|tL", ["position 4", "closes none"]),
        ("Et*|ttL", ["position 4", "number"]),
        ("Et*0|ttL", ["position 4", "number from 1"]),
        ("*2Et|tL", ["position 1", "* has to follow"]),
        ("EttttL", ["1 stages", "is 2", "put 1 |"]),
        ("Ettt|ttL", ["5 t (layers)", "needs 4"]),
        ("tttt|L", ["0 E (embedding)"]),
        ("EttL|ttL", ["2 L (loss)"]),
        ("|EttttL", ["E in another than the first stage"]),
        ("EttttL|", ["L in another than the last stage"]),
        ("ttE|ttL", ["t before E"]),
        ("Ett|ttmL", ["1 m (blocks of multi-token prediction)", "needs 0"]),
    ],
)
def test_a_bad_layout_is_named_with_its_place(layout, words) -> None:
    with pytest.raises(ConfigError) as caught:
        stages_from_layout(layout, 4, 2)
    assert all(word in str(caught.value) for word in ["pipeline_model_parallel_layout", *words]), caught.value


def test_placement() -> None:
    assert ranks_of_stages(6, 3, "loop") == (0, 1, 2, 0, 1, 2)
    assert ranks_of_stages(6, 3, "v") == (0, 1, 2, 2, 1, 0)
    assert stages_of_rank(0, 6, 3, "v") == (0, 5)
    assert stages_of_rank(1, 6, 3, "loop") == (1, 4)

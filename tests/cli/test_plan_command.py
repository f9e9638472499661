"""`mt plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = EXAMPLES / "gpt-3d.toml"


def test_the_gpt3_example_is_planned(mt) -> None:
    outcome = mt("plan", EXAMPLES / "gpt3-175b.toml", "--world-size", 1024, "--json")
    assert outcome.code == 0, outcome.err
    plan = json.loads(outcome.out)
    assert (plan["layout"]["tp"], plan["layout"]["dp"], plan["layout"]["pp"]) == (8, 8, 16)
    assert plan["micro_batches"] == 192
    assert plan["ranks"][0]["parameters"] == 1_463_270_400
    assert plan["ramp_up"][0]["global_batch_size"] == 16
    assert plan["fits"]
    assert set(plan["ranks"][0]["messages"]) == {"tp", "pp", "dp", "stage_copies"}


def test_a_table_says_what_ranks_hold_and_whether_it_fits(mt) -> None:
    outcome = mt("plan", SMALL, "--world-size", 8, "--memory-gib", "0.001")
    assert outcome.code == 0, outcome.err
    assert "8 ranks: tp 2 x dp 2 x pp 2; 4 micro-batches a step" in outcome.out
    assert "does not fit into 0.0 GiB" in outcome.out


def test_a_search_lists_layouts_and_refusals(mt) -> None:
    outcome = mt("plan", SMALL, "--world-size", 8, "--search", "--top", 3, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert len(found["layouts"]) == 3
    times = [layout["estimated_seconds"] for layout in found["layouts"]]
    assert times == sorted(times)
    assert found["refused"]


def test_a_layout_that_does_not_fit_the_world_is_refused(mt) -> None:
    outcome = mt("plan", SMALL, "--world-size", 6)
    assert outcome.code == 2
    assert "does not divide the number of processes=6" in outcome.err


def test_an_unknown_machine_is_refused_with_the_names(mt) -> None:
    outcome = mt("plan", SMALL, "--world-size", 8, "--machine", "b200")
    assert outcome.code == 2
    assert "h100, h200, a100" in outcome.err

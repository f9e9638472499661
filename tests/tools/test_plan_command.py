"""`mt plan` as a user types it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mt_tools.plan.machines import get_machine

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = EXAMPLES / "gpt-3d.toml"


@pytest.mark.slow
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
    assert outcome.lines[-1][:7] == ["machine", "h100", "is", "assumed;", "--machine", "takes", "this"]
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_a_machine_that_was_named_is_not_assumed(mt) -> None:
    command = ("plan", "--preset", "gpt-tiny")
    for named, assumed in (((), True), (("--machine", "h100"), False)):
        values = json.loads(mt(*command, *named, "--json").out)
        assert (values["machine"], values["machine_is_assumed"]) == ("h100", assumed)
    assert "assumed" not in mt(*command, "--machine", "h100").out


@pytest.mark.slow
def test_a_search_lists_layouts_and_refusals(mt) -> None:
    outcome = mt("plan", SMALL, "--world-size", 8, "--search", "--top", 3, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert len(found["layouts"]) == 3
    rates = [layout["estimated_tokens_per_second"] for layout in found["layouts"]]
    assert rates == sorted(rates, reverse=True)
    # One batch for all: the rate is that of the same tokens.
    assert len({layout["tokens_per_step"] for layout in found["layouts"]}) == 1
    for layout, rate in zip(found["layouts"], rates, strict=True):
        assert rate * layout["estimated_seconds"] == pytest.approx(layout["tokens_per_step"])
    assert found["refused"]


def test_a_search_without_a_global_batch_is_refused(mt) -> None:
    outcome = mt("plan", SMALL, "--world-size", 8, "--search", "--set", "train.global_batch_size=null")
    assert outcome.code == 2
    assert "train.global_batch_size is not set" in outcome.err


@pytest.mark.parametrize(
    "setting",
    [
        "pipeline_model_parallel_layout=Ett|ttL",
        "num_layers_in_first_pipeline_stage=2",
        "num_layers_in_last_pipeline_stage=2",
        "account_for_loss_in_pipeline_split=true",
    ],
)
def test_a_search_leaves_out_how_the_configured_stages_are_divided(mt, setting) -> None:
    outcome = mt("plan", SMALL, "--world-size", 2, "--search", "--set", f"parallel.{setting}", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["layouts"]


# -- 80 columns -----------------------------------------------------------------------------------------


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    """First word of each row of the table with this title -> its other words."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()
    return {words[0]: words[1:] for words in map(str.split, lines[1:])}


@pytest.mark.slow
def test_every_number_of_a_rank_is_there_in_80_columns(mt, monkeypatch) -> None:
    """And stages that send alike are one row."""
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("plan", EXAMPLES / "gpt3-175b.toml", "--world-size", 1024)
    text, ranks = mt(*asked).out, json.loads(mt(*asked, "--json").out)["ranks"]
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    standing, held = rows_of(text, "pipeline rank"), rows_of(text, "GiB of a rank")
    for rank in ranks:
        (number,) = map(str, rank["pp_ranks"])
        stored = rank["bytes"]
        parts = [stored[key] for key in ("weights", "gradients", "main_weights", "optimizer_state")]
        kept = sum(stored["activations"].values()) + stored["temporary"]
        assert held[number] == [gib(size) for size in (*parts, kept, stored["communication_buffers"], stored["total"])]
        assert standing[number] == ["64", f"{rank['parameters']:,}", str(rank["micro_batches_in_flight"])]
    sent = rows_of(text, "GiB sent")
    assert list(sent) == ["0", "1-14", "15"]
    assert sent["1-14"] == [gib(ranks[7]["messages"].get(axis, {}).get("sent", 0)) for axis in ranks[0]["messages"]]


def test_stages_apart_that_hold_alike_are_rows_of_their_own(mt) -> None:
    """With GPipe stages 1 and 3, of one layer each, hold alike, and stage 2 with its two layers stands between."""
    layout = "parallel.pipeline_model_parallel_layout='Et|t|tt|t|tL'"
    sizes = ("parallel.pipeline_model_parallel_size=5", "parallel.tensor_model_parallel_size=1", "model.num_layers=6")
    others = ("parallel.pipeline_schedule=gpipe", "parallel.sequence_parallel=false", "model.vocab_size=99999", layout)
    settings = [word for setting in (*sizes, *others) for word in ("--set", setting)]
    held = rows_of(mt("plan", SMALL, "--world-size", 5, *settings).out, "GiB of a rank")
    assert list(held) == ["0", "1", "2", "3", "4"]


@pytest.mark.slow
def test_a_search_fits_into_80_columns_with_experts(mt, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("plan", EXAMPLES / "mixtral-tiny.toml", "--world-size", 4, "--search", "--top", 99)
    outcome = mt(*asked)
    assert outcome.code == 0, outcome.err
    assert "etp" in outcome.out
    assert "…" not in outcome.out
    found = json.loads(mt(*asked, "--json").out)["layouts"]
    listed, spent = rows_of(outcome.out, "#  "), rows_of(outcome.out, "seconds of #")
    for number, layout in enumerate(found, 1):
        parts = (layout["estimated_seconds_of"][part] for part in ("products", "messages", "waiting", "end"))
        assert spent[str(number)] == [f"{part:.3g}" for part in (layout["estimated_seconds"], *parts)]
        assert listed[str(number)][-2:] == [
            f"{layout['estimated_tokens_per_second']:,.0f}",
            f"{layout['estimated_utilization']:.1%}",
        ]


@pytest.mark.slow
def test_a_plan_that_is_piped_is_whole(mt_process) -> None:
    """And needs no compiler, whose import would double its time."""
    outcome = mt_process("plan", SMALL, "--world-size", 8, COLUMNS="80", PYTHONPROFILEIMPORTTIME="1")
    assert outcome.code == 0, outcome.err
    imported = {line.rpartition("|")[2].strip() for line in outcome.err.splitlines()}
    assert "mt_tools.plan.layouts" in imported
    assert "torch._dynamo" not in imported
    assert "…" not in outcome.out
    assert {len(words) for words in rows_of(outcome.out, "GiB of a rank").values()} == {7}


def test_a_layout_that_does_not_fit_the_world_is_refused(mt) -> None:
    outcome = mt("plan", SMALL, "--world-size", 6)
    assert outcome.code == 2
    assert "does not divide the number of processes=6" in outcome.err


def test_an_unknown_machine_is_refused_with_the_names(mt) -> None:
    outcome = mt("plan", SMALL, "--world-size", 8, "--machine", "b200")
    assert outcome.code == 2
    assert "h100, h200, a100" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["bert-base-uncased"],
            "data.dataset_type=builtin gives no tokentype_ids and padding_mask, which model.family",
        ),
        (["t5-small", "--search"], "data.dataset_type=builtin gives no encoder_tokens and decoder_tokens"),
        (["t5-small", "--longest-sequence", "--memory-gib", "inf"], "--memory-gib inf is no memory of a rank"),
        (["bert-base-uncased", "--set", "data.dataset_type=qqp"], "use model.family=bert_classification"),
    ],
)
def test_data_that_do_not_fit_the_model_are_refused(mt, arguments, words) -> None:
    outcome = mt("plan", "--preset", *arguments)  # none of which has a length of the run
    assert outcome.code == 2
    assert words in outcome.err


@pytest.mark.parametrize(
    ("gpu", "has_speed"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA GeForce RTX 4090", False), (None, False)]
)
def test_this_machine_is_named_and_has_times_where_its_speed_is_known(monkeypatch, gpu, has_speed) -> None:
    about = SimpleNamespace(name=gpu, total_memory=24 * 2**30, major=8, minor=9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu is not None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: about)
    found = get_machine("this", processes=2)
    assert (found.has_speed, found.is_cpu) == (has_speed, gpu is None)
    assert found.name == ("h100" if has_speed else gpu or "this CPU")
    if gpu is not None:
        assert (found.memory_gib, found.capability) == (24, (8, 9))
    else:
        assert 2 * found.memory_gib <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def test_a_plan_of_this_machine_estimates_no_time_without_a_known_gpu(mt, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = ("plan", "--preset", "gpt-tiny", "--machine", "this")
    values = json.loads(mt(*command, "--json").out)
    assert (values["machine"], values["estimated_seconds"], values["fits"]) == ("this CPU", None, True)
    assert "--search ranks layouts by time" in mt(*command, "--search").err

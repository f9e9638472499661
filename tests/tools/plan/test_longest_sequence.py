"""The longest sequence that fits, and what bf16 weights with remainders hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mt_cli.main import run

TINY = ("--preset", "gpt-tiny", "--set", "precision.dtype=bf16", "--set", "model.position_embedding_type=rope")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert run(["plan", *TINY, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_longest_sequence_fits_and_the_next_one_does_not(capsys) -> None:
    found = planned(capsys, "--longest-sequence", "--memory-gib", "1")
    length = found["longest_sequence"]
    assert length % 1024 == 0
    assert found["fits"]
    for tokens, fits in ((length, True), (length + 1024, False)):
        at_length = planned(capsys, "--memory-gib", "1", "--set", f"data.seq_length={tokens}")
        assert at_length["fits"] == fits


@pytest.mark.slow
def test_the_decoder_of_a_model_of_images_gets_the_positions(capsys) -> None:
    """The example has 64."""
    example = Path(__file__).parents[3] / "examples" / "qwen_vl.toml"
    assert run(["plan", str(example), "--longest-sequence", "--memory-gib", "0.8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["longest_sequence"] >= 1024


IN_BF16 = ("optimizer.exp_avg_dtype=bf16", "precision.accumulate_allreduce_grads_in_fp32=false")


@pytest.mark.parametrize(
    ("settings", "bytes_of_one"),
    [(IN_BF16, 10), ((), 16), (("optimizer.main_weights=copies",), 18), (("train.device=cpu",), 18)],
)
def test_bytes_that_are_held_of_a_parameter(settings, bytes_of_one, capsys) -> None:
    """On a GPU by default bf16 weights, gradients and two moments, and 16 more bits of each weight."""
    (rank,) = planned(capsys, *(word for setting in settings for word in ("--set", setting)))["ranks"]
    sizes = rank["bytes"]
    held = sum(sizes[key] for key in ("weights", "gradients", "main_weights", "optimizer_state"))
    assert held == pytest.approx(bytes_of_one * rank["parameters"], rel=0.01)


def test_a_model_that_fits_at_no_length_is_an_error(capsys) -> None:
    assert run(["plan", *TINY, "--longest-sequence", "--memory-gib", "0.001"]) == 2
    assert "not even data.seq_length=1024 fits into 0.0 GiB" in capsys.readouterr().err
    for memory in ("nan", "0"):
        assert run(["plan", *TINY, "--memory-gib", memory]) == 2
        assert f"--memory-gib {float(memory)} is no memory" in capsys.readouterr().err
    assert run(["plan", *TINY, "--longest-sequence", "--search"]) == 2
    assert "give one of them" in capsys.readouterr().err

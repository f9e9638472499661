"""mt compare: which step, which quantity, which cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import typer
from tests.ops.test_reading import MEGATRON
from typer.testing import CliRunner

from mt_ops.commands.compare import compare as command
from mt_ops.compare.comparison import compare
from mt_ops.compare.quantities import relative_differences
from mt_ops.reading.opening import open_run
from mt_ops.report.page import report

APP = typer.Typer()
APP.command()(command)


def write(folder: Path, *, rates: list[float], losses: list[float], batch: int = 4, **config: Any) -> Path:
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step, (rate, loss) in enumerate(zip(rates, losses, strict=True), start=1):
            row = {"kind": "train", "iteration": step, "consumed_samples": batch * step, "learning_rate": rate}
            file.write(json.dumps({**row, "loss": loss, "grad_norm": 1.0, "iteration_time": 0.1 * batch}) + "\n")
    tree: dict[str, dict[str, Any]] = {"train": {"global_batch_size": batch}}
    for key, value in config.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


RATES, LOSSES = [0.1, 0.2, 0.3, 0.4], [5.0, 4.0, 3.0, 2.0]


def test_same_runs_at_other_speeds(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, rates=RATES, losses=LOSSES) for name in "ab")
    (b / "metrics.jsonl").write_text(
        (b / "metrics.jsonl").read_text().replace('"iteration_time": 0.4', '"iteration_time": 9.0')
    )
    assert compare(open_run(a), open_run(b)).first is None
    assert CliRunner().invoke(APP, [str(a), str(b)]).exit_code == 0


def test_learning_rate_comes_before_the_loss_that_follows_from_it(tmp_path: Path) -> None:
    a = write(tmp_path / "a", rates=RATES, losses=LOSSES, optimizer__lr=0.4, model__width=8)
    b = write(
        tmp_path / "b", rates=[0.1, 0.1, 0.2, 0.3], losses=[5.0, 4.2, 3.3, 2.9], optimizer__lr=0.3, model__width=9
    )
    result = CliRunner().invoke(APP, [str(a), str(b), "--json"])
    found = json.loads(result.output)
    assert result.exit_code == 1
    assert (found["first"]["quantity"], found["first"]["step"]) == ("learning_rate", 2)
    assert [cause["key"] for cause in found["causes"]] == ["optimizer.lr"]


def test_a_section_that_one_run_does_not_have_is_one_line(tmp_path: Path) -> None:
    a = write(tmp_path / "a", rates=RATES, losses=LOSSES, adapter__rank=4, adapter__alpha=8, eval__tasks=3)
    b = write(tmp_path / "b", rates=RATES, losses=LOSSES, eval__tasks=5)
    output = CliRunner().invoke(APP, [str(a), str(b)]).output
    assert "configuration: 2 differences" in output
    assert "  [adapter]: 2 values | \N{EN DASH}\n" in output
    assert "  eval.tasks: 3 | 5\n" in output
    assert "adapter.rank" not in output
    page = report([open_run(a), open_run(b)])
    assert page.count("[adapter]") == 1


def test_rounding_is_within_the_tolerance_and_shown(tmp_path: Path) -> None:
    a = write(tmp_path / "a", rates=RATES, losses=LOSSES)
    b = write(tmp_path / "b", rates=RATES, losses=[5.0, 4.0000004, 3.0, 2.5], parallel__tensor_model_parallel_size=2)
    loss = next(each for each in compare(open_run(a), open_run(b)).quantities if each.name == "loss")
    assert loss.first is not None
    assert loss.parts is not None
    assert (loss.first.step, loss.parts.step) == (2, 4)


def test_batch_sizes_and_events_explain(tmp_path: Path) -> None:
    a = write(tmp_path / "a", rates=RATES, losses=LOSSES)
    b = write(tmp_path / "b", rates=RATES, losses=LOSSES, batch=8)
    compared = compare(open_run(a), open_run(b))
    assert compared.first is not None
    assert (compared.first.name, compared.causes[0].key) == ("samples", "train.global_batch_size")
    c = write(tmp_path / "c", rates=RATES, losses=[5.0, 4.0, 3.5, 2.0])
    (c / "events.jsonl").write_text('{"time": 1.0, "iteration": 2, "kind": "warning", "text": "a bad shard"}\n')
    assert compare(open_run(a), open_run(c)).causes[0].text == "c, step 2: warning: a bad shard"


def test_a_run_of_mt_with_a_log_of_megatron(tmp_path: Path) -> None:
    (tmp_path / "megatron.log").write_text(MEGATRON)
    a = write(tmp_path / "a", rates=[1.5e-4, 3e-4], losses=[4.947, 4.6], batch=16)
    result = CliRunner().invoke(APP, [str(a), str(tmp_path / "megatron.log")])
    assert "they part at step 1 in grad_norm: 1 | 4.144" in result.output


def test_samples_are_compared_by_content(tmp_path: Path) -> None:
    from mt_ops.compare.drawn_samples import drawn_samples

    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        model = {"family": "gpt", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 261}
        model["position_embedding_type"] = "rope"
        data = {"dataset_type": "builtin", "seq_length": 16, "corpus_bytes": 100_000}
        train = {"seed": seed, "train_iters": 2, "global_batch_size": 2, "micro_batch_size": 2}
        tree = {"model": model, "data": data, "train": train, "tokenizer": {"tokenizer_type": "ByteLevelTokenizer"}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tree))
    a, b, c = (open_run(tmp_path / name) for name in "abc")
    assert drawn_samples(a, b, 4).text == "the first 4 are the same, as the files are now"
    assert drawn_samples(a, c, 4).text.startswith("sample 0 is the built-in corpus")


def test_values_that_are_not_finite() -> None:
    x, y = np.array([np.nan, np.nan, np.inf, 0.0, 2.0]), np.array([np.nan, 1.0, np.inf, 0.0, 1.0])
    assert relative_differences(x, y).tolist() == [0.0, np.inf, 0.0, 0.0, 0.5]

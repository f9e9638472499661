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
    a = write(tmp_path / "a", rates=[1.5e-4, 3e-4], losses=[4.947, 4.6], batch=16, model__family="gpt")
    result = CliRunner().invoke(APP, [str(a), str(tmp_path / "megatron.log")])
    assert "they part at step 1 in grad_norm: 1 | 4.144" in result.output
    assert "configuration: B has none that can be compared; whether keys differ is not known" in result.output
    assert "in A and None in B" not in result.output
    assert "nothing before it that differs explains this" in result.output


def test_keys_of_a_section_that_one_run_does_not_have_are_no_causes(tmp_path: Path) -> None:
    a = write(tmp_path / "a", rates=RATES, losses=LOSSES, kernels__attention="flash", model__width=8)
    b = write(tmp_path / "b", rates=RATES, losses=[5.1, 4.0, 3.0, 2.0], model__width=9)
    assert [cause.key for cause in compare(open_run(a), open_run(b)).causes] == ["model.width"]


def averaged(a: Path, every: int, *, first: bool = True) -> list[str]:
    """The lines of a run of mt as another log_interval gives them: losses are means since the line before."""
    rows = [json.loads(line) for line in (a / "metrics.jsonl").read_text().splitlines()]
    chosen, since = [], 0
    for place, row in enumerate(rows, start=1):
        if place % every == 0 or (first and place == 1):
            mean = sum(earlier["loss"] for earlier in rows[since:place]) / (place - since)
            chosen.append(json.dumps({**row, "loss": mean}) + "\n")
            since = place
    return chosen


def test_losses_of_other_log_intervals_are_compared_over_the_same_steps(tmp_path: Path) -> None:
    losses = [5.0 - 0.1 * step for step in range(30)]
    a, b, c = (write(tmp_path / name, rates=[0.1] * 30, losses=losses) for name in "abc")
    (b / "metrics.jsonl").write_text("".join(averaged(a, 10)))
    result = CliRunner().invoke(APP, [str(a), str(b)])
    assert (result.exit_code, "the same within tolerance" in result.output) == (0, True), result.output
    assert (
        "loss: lines are means over up to 1 steps in A and 10 in B; compared are means over the same steps\n"
        in result.output
    )
    # Of 3 and 5 steps: the means up to 15 and 30 alone are over the same steps.
    (b / "metrics.jsonl").write_text("".join(averaged(a, 3, first=False)))
    (c / "metrics.jsonl").write_text("".join(averaged(a, 5, first=False)))
    compared = compare(open_run(b), open_run(c))
    assert (compared.first, [each.steps for each in compared.quantities if each.name == "loss"]) == (None, [2])
    # One step that is other is seen in the mean that has it.
    (c / "metrics.jsonl").write_text("".join(averaged(a, 10)))
    (a / "metrics.jsonl").write_text((a / "metrics.jsonl").read_text().replace(f'"loss": {losses[13]}', '"loss": 9.0'))
    first = compare(open_run(a), open_run(c)).first
    assert first is not None
    assert first.parts is not None
    assert (first.name, first.parts.step, round(first.parts.a - first.parts.b, 6)) == ("loss", 20, 0.53)


def test_means_of_a_resumed_run_begin_where_it_began(tmp_path: Path) -> None:
    """It went on from step 15: its line of step 20 is of 5 steps, and no mean of the other is over these alone."""
    a, b = (write(tmp_path / name, rates=[0.1] * 20, losses=[5.0 - 0.1 * step for step in range(20)]) for name in "ab")
    lines = averaged(a, 10)
    resumed = json.loads(lines[-1]) | {"loss": sum(5.0 - 0.1 * step for step in range(15, 20)) / 5}
    (b / "metrics.jsonl").write_text("".join(lines[:-1]) + json.dumps(resumed) + "\n")
    (b / "events.jsonl").write_text('{"time": 1.0, "iteration": 15, "kind": "start"}\n')
    assert compare(open_run(a), open_run(b)).first is None
    (a / "metrics.jsonl").write_text("".join(lines))
    compared = compare(open_run(a), open_run(b))
    (loss,) = [each for each in compared.quantities if each.name == "loss"]
    assert (compared.first, loss.steps) == (None, 2)
    assert "1 steps, at which no mean of both is over the same steps, are left out" in str(loss.note)


def test_logs_of_megatron_with_other_intervals(tmp_path: Path) -> None:
    def log(every: int) -> Path:
        rows = [
            f" iteration {step:8d}/ 200 | lm loss: {5 - 0.01 * (step - (every - 1) / 2):.6E} | grad norm: 1.000 |\n"
            for step in range(every, 201, every)
        ]
        (tmp_path / f"{every}.log").write_text("".join(rows))
        return tmp_path / f"{every}.log"

    compared = compare(open_run(log(10)), open_run(log(100)))
    assert (compared.first, [(each.name, each.steps) for each in compared.quantities]) == (
        None,
        [("loss", 2), ("grad_norm", 2)],
    )


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

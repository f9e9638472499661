"""What Weights & Biases, MLflow, trackio and Comet have of a run that was stopped and resumed, without a network."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.peer.environment import python_beside_this

TRACKERS = ("wandb", "mlflow", "trackio", "comet")
PACKAGES = ("wandb", "mlflow-skinny", "sqlalchemy<3", "alembic", "trackio", "comet_ml")
PROCESS = Path(__file__).parent / "tracker_process"


def ask(script: str, *arguments: str, **settings: str) -> str:
    done = subprocess.run(
        [str(python_beside_this(*PACKAGES)), str(PROCESS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "COMET_START_ONLINE": "0", **settings},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "small"


@pytest.fixture(scope="module")
def found(run_dir: Path) -> dict[str, Any]:
    folder = run_dir.parent
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    settings = {"TRACKIO_DIR": str(folder / "trackio"), "COMET_OFFLINE_DIRECTORY": str(folder / "comet")}
    options = [f"logging.trackers={json.dumps(TRACKERS)}", f"mlflow.tracking_uri={uri}"]
    ask("train.py", str(run_dir), *options, "mlflow.experiment=small", **settings)
    last = ask("read.py", str(run_dir), uri, str(folder / "comet"), **settings).splitlines()[-1]
    return json.loads(last)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_it_has_the_curves_of_the_run(run_dir: Path, found: dict[str, Any], tracker: str) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    series = found[tracker]["series"]
    for ours, name in (("loss", "lm loss"), ("learning_rate", "learning-rate"), ("grad_norm", "grad-norm")):
        assert series[name] == [[line["iteration"], pytest.approx(line[ours])] for line in train], name
    samples = {(line["iteration"], line["consumed_samples"]) for line in train}
    assert {(step, round(float(value))) for step, value in series["consumed-samples"]} == samples
    assert sorted(step for step, _ in series["iteration-time"]) == [1, 2, 3, 4]
    valid = [[line["iteration"], pytest.approx(line["valid_loss"])] for line in lines if line["kind"] == "valid"]
    assert series["lm loss validation"] == valid
    assert found[tracker]["learning rate"] == json.loads((run_dir / "config.json").read_text())["optimizer"]["lr"]


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_resumed_run_is_the_same_run(run_dir: Path, found: dict[str, Any], tracker: str) -> None:
    known = json.loads((run_dir / "trackers.json").read_text())[tracker]
    assert set(found[tracker]["names"]) == {known}

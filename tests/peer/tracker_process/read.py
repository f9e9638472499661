"""Run in an environment with the trackers: read.py RUN_DIR MLFLOW_URI COMET_DIR prints what each of them has, as JSON.

{tracker: {"names": runs, "learning rate": of the configuration, "series": {metric: [[step, value], ...]}}}
"""

from __future__ import annotations

import json
import struct
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 2**15
WHOLE, LAST = 1, 4
"""Kinds of parts after which a record is complete."""


def read_wandb(run_dir: Path) -> dict[str, Any]:
    """The protobuf records of offline runs."""
    from wandb.proto import wandb_internal_pb2 as messages

    names, rates, series = [], [], defaultdict(list)
    for file in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.parent.name):
        for data in log_records(file.read_bytes()):
            record = messages.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                names.append(record.run.run_id)
                config = {entry.key: json.loads(entry.value_json) for entry in record.run.config.update}
                rates.append(config["optimizer"]["lr"])
            for item in record.history.item:
                series[item.key or item.nested_key[0]].append([record.history.step.num, json.loads(item.value_json)])
    return {"names": names, "learning rate": rates[0], "series": series}


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format (blocks of 32 KiB; parts with checksum, length and kind), after W&B's 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def read_mlflow(run_dir: Path, uri: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    series = {
        name: [[point.step, point.value] for point in client.get_metric_history(runs[0].info.run_id, name)]
        for name in runs[0].data.metrics
    }
    return {
        "names": [run.info.run_id for run in runs],
        "learning rate": float(runs[0].data.params["optimizer.lr"]),
        "series": series,
    }


def read_trackio(run_dir: Path) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    names, series = SQLiteStorage.get_runs("mt"), defaultdict(list)
    for entry in SQLiteStorage.get_logs("mt", names[0]):
        for key, value in entry.items():
            if key not in ("step", "timestamp"):
                series[key].append([entry["step"], value])
    config = SQLiteStorage.get_run_config("mt", names[0])
    return {"names": names, "learning rate": config["optimizer"]["lr"], "series": series}


def read_comet(folder: Path) -> dict[str, Any]:
    """The messages in the archives of offline experiments."""
    names, rates, series = [], [], defaultdict(list)
    for file in sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime):
        with zipfile.ZipFile(file) as archive:
            names.append(json.loads(archive.read("experiment.json"))["offline_id"])
            messages = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
        for message in messages:
            if metric := message["payload"].get("metric"):
                series[metric["metricName"]].append([metric["step"], metric["metricValue"]])
            if (param := message["payload"].get("param")) and param["paramName"] == "optimizer|lr":
                rates.append(float(param["paramValue"]))
    return {"names": names, "learning rate": rates[0], "series": series}


def main(run_dir: str, mlflow_uri: str, comet: str) -> None:
    run = Path(run_dir)
    found = {
        "wandb": read_wandb(run),
        "mlflow": read_mlflow(run, mlflow_uri),
        "trackio": read_trackio(run),
        "comet": read_comet(Path(comet)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

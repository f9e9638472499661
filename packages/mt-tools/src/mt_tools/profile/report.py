"""What a recording says: the table by kind, the share of the roof, and the largest losses with the key that changes
each."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError

MERGED = "trace.json.gz"
SHOWN_LOSSES = 5


@dataclass(frozen=True)
class Row:
    """Time in a step, the mean over ranks. tflops: achieved by the products of a device, None where there are none."""

    name: str
    direction: str
    seconds: float
    share: float
    tflops: float | None


@dataclass(frozen=True)
class Loss:
    """Seconds of a step that are no products at the roof, what they are, and the key that would change it."""

    what: str
    seconds: float
    key: str


def read_summaries(folder: Path) -> list[dict[str, Any]]:
    """Summaries of all ranks. Raises ConfigError for a folder without any."""
    paths = sorted(folder.glob("summary-rank-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    if not paths:
        raise ConfigError(f"{folder} has no recording; mt profile CONFIG makes one")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def rows(summaries: Sequence[Mapping[str, Any]], *, by_layer: bool) -> list[Row]:
    """By kind and direction, or by layer and direction; the largest first."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for summary in summaries:
        for operation in summary["operations"]:
            name = (operation["layer"] or operation["kind"]) if by_layer else operation["kind"]
            entry = totals[name, operation["direction"]]
            for place, key in enumerate(("seconds", "product_seconds", "flops")):
                entry[place] += operation[key] / len(summaries)
    whole = sum(entry[0] for entry in totals.values()) or 1.0
    listed = [
        Row(name, direction, seconds, seconds / whole, flops / products / 1e12 if products > 0 and flops else None)
        for (name, direction), (seconds, products, flops) in totals.items()
    ]
    return sorted(listed, key=lambda row: -row.seconds)


def losses(summaries: Sequence[Mapping[str, Any]], roof_tflops: float | None) -> list[Loss]:
    """The largest, by seconds of a step. roof_tflops: of the products of a device; None where it is not known."""
    first = summaries[0]
    parts, axes = _mean_parts(summaries), first["axes"]
    kinds = _seconds_by_kind(summaries)
    candidates = [
        Loss("waiting for data", parts.get("data_wait", 0.0), "data.num_workers, data.prefetch_batches"),
        Loss("waiting for other ranks", parts.get("communication", 0.0), _communication_key(axes)),
        Loss("the optimizer", parts.get("optimizer", 0.0), _optimizer_key(axes)),
        Loss("the host between operations", parts.get("other", 0.0), "train.cuda_graphs, logging.log_interval"),
        Loss("recomputed activations", kinds["recomputed"], "recompute.recompute_granularity"),
        Loss("operations that are no products", kinds["others"], "train.compile, kernels"),
    ]
    if roof_tflops:
        lost = max(kinds["products"] - kinds["flops"] / (roof_tflops * 1e12), 0.0)
        candidates.append(Loss("products below the roof", lost, "train.micro_batch_size, data.seq_length"))
    return sorted(candidates, key=lambda loss: -loss.seconds)[:SHOWN_LOSSES]


def _mean_parts(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = {name for summary in summaries for name in summary["parts"]}
    return {name: sum(summary["parts"].get(name, 0.0) for summary in summaries) / len(summaries) for name in names}


def _seconds_by_kind(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    totals = {"products": 0.0, "flops": 0.0, "others": 0.0, "recomputed": 0.0}
    for summary in summaries:
        for operation in summary["operations"]:
            if operation["direction"] == "recomputed":
                totals["recomputed"] += operation["seconds"]
            elif operation["direction"] in ("forward", "backward"):
                totals["products"] += operation["product_seconds"]
                totals["flops"] += operation["flops"]
                totals["others"] += operation["seconds"] - operation["product_seconds"]
    return {name: value / len(summaries) for name, value in totals.items()}


def _communication_key(axes: Mapping[str, int]) -> str:
    if axes.get("pp", 1) > 1:
        return "parallel.pipeline_schedule, more micro-batches (train.global_batch_size)"
    if axes.get("tp", 1) > 1:
        return "parallel.tp_comm_overlap, parallel.sequence_parallel"
    return "parallel.overlap_grad_reduce, parallel.overlap_param_gather"


def _optimizer_key(axes: Mapping[str, int]) -> str:
    return (
        "parallel.use_distributed_optimizer"
        if axes.get("dp", 1) > 1
        else "train.global_batch_size, optimizer.optimizer"
    )


# -- one trace of all ranks --------------------------------------------------------------------------


def merge_traces(folder: Path) -> Path:
    """The traces of all ranks in one file that Perfetto opens, each rank a process of its own."""
    merged: list[dict[str, Any]] = []
    paths = sorted(folder.glob("trace-rank-*.json.gz"), key=_rank_of)
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            merged += _of_rank(json.load(file)["traceEvents"], _rank_of(path))
    target = folder / MERGED
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=3) as file:
        json.dump({"traceEvents": merged, "displayTimeUnit": "ms"}, file)
    return target


def _rank_of(path: Path) -> int:
    return int(path.name.removesuffix(".json.gz").rpartition("-")[2])


def _of_rank(events: Iterable[Mapping[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Processes and flows under numbers that no other rank has."""
    renumbered = []
    for event in events:
        changed = dict(event)
        changed["pid"] = f"rank {rank}, {event.get('pid', 0)}"
        if "id" in event:
            changed["id"] = f"{rank}-{event['id']}"
        if event.get("name") == "process_name":
            changed["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}
        renumbered.append(changed)
    return renumbered

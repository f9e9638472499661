"""Joins the shards of a run, in the order of the input, into the outputs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_data.indexed import IndexedDatasetWriter
from mt_data.preprocess.options import Counts
from mt_data.preprocess.partial import PartialFolder
from mt_data.preprocess.run_plan import RunPlan
from mt_data.preprocess.shards import ShardResult, output_files, skipped_path


def refuse_existing(prefixes: Iterable[Path]) -> None:
    """DataError when an output is there already."""
    for prefix in prefixes:
        for file in output_files(prefix):
            if file.exists():
                raise DataError(f"{file} exists; give another --output-prefix, or --overwrite to replace it")


def join_run(plan: RunPlan, folder: PartialFolder, results: list[ShardResult]) -> tuple[Counts, int]:
    """Write the outputs and the list of skipped lines; (sums over the shards, their number)."""
    zero = dict.fromkeys(plan.outputs, 0)
    counts = Counts(sequences=dict(zero), tokens=dict(zero))
    for result in results:
        counts.add(result.counts)
    if not counts.documents and plan.share.count == 1:
        raise DataError(
            f"the inputs hold no document that can be used ({counts.skipped} were skipped); give --input files with "
            "texts, and --json-keys the keys that hold them"
        )
    names = [result.name for result in results]
    # One output after the other; a kill in between leaves those before it finished, and all are written again by the
    # next run, since run.json does not say "joined" yet.
    for key, prefix in plan.outputs.items():
        with IndexedDatasetWriter(prefix, plan.task.dtype) as writer:
            for name in names:
                writer.append(folder.prefix(name, key, plan.task.level))
            writer.finish(tokenizer=plan.tokenizer_record, extra=_origin(plan, key, counts))
    _join_skipped(plan.skipped_report, [skipped_path(folder.path, r.name) for r in results if r.counts.skipped])
    folder.record_joined(counts, len(results))
    return counts, len(results)


def _origin(plan: RunPlan, key: str, counts: Counts) -> dict[str, Any]:
    """What the manifest says of how an output was made."""
    return {
        "made_by": "mt data preprocess",
        "json_key": key,
        "level": plan.task.level,
        "append_eod": plan.options.append_eod,
        "eod": plan.eod,
        "sentences": plan.identity()["sentences"],
        "inputs": [{"path": str(file.path), "size": file.size} for file in plan.files],
        "part": {"index": plan.share.index, "of": plan.share.count},
        "skipped": counts.skipped,
    }


def _join_skipped(path: Path, parts: list[Path]) -> None:
    """A JSON line for each skipped line of the input; no file when none was."""
    if not parts:
        # A report that an earlier run left would otherwise look like this run's.
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as joined:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, joined)
    os.replace(temporary, path)

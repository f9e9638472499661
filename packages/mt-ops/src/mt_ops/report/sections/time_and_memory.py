"""Where the time of the allocation went, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mt_core.run_events import TimeAccount, account
from mt_core.wording import counted
from mt_ops.reading.run import Run
from mt_ops.report.html import Section, clock_time, details, duration, note, size, table

MOST_RANKS = 256


def time_by_part(runs: Sequence[Run]) -> Section | None:
    known = [(run, account(run.events, run.status)) for run in runs]
    accounts = [(run, times) for run, times in known if times is not None and times.total > 0]
    if not accounts:
        return None
    parts = [_bar(run.name, times) for run, times in accounts[:20]]
    named = sorted({part for _, times in accounts for part in times.parts})
    rows = [
        [run.name, duration(times.total), f"{times.effective:.1%}", *(_share(times, part) for part in named)]
        for run, times in accounts
    ]
    headers = ["run", "in all", "effective", *(part.replace("_", " ") for part in named)]
    return Section("time", "Where the time went", "".join(parts) + table(headers, rows))


def _share(times: TimeAccount, part: str) -> str | None:
    return f"{times.parts[part] / times.total:.1%}" if part in times.parts else None


def _bar(name: str, times: TimeAccount) -> str:
    """An SVG bar of the parts, the largest first."""
    order = sorted(times.parts.items(), key=lambda item: -item[1])
    at, boxes = 0.0, []
    for place, (part, seconds) in enumerate(order):
        width = 100.0 * seconds / times.total
        title = f"<title>{escape(part)} {seconds / times.total:.1%}, {duration(seconds)}</title>"
        boxes.append(f'<rect class="c{place % 10}" x="{at:.3f}%" width="{width:.3f}%" height="22">{title}</rect>')
        if width > 9:
            boxes.append(f'<text x="{at + 0.6:.3f}%" y="15">{escape(part.replace("_", " "))}</text>')
        at += width
    label = ", ".join(f"{part} {seconds / times.total:.1%}" for part, seconds in order)
    return (
        f'<figure class="bar"><figcaption>{escape(name)}</figcaption><svg role="img" width="100%" height="22" '
        f'aria-label="{escape(label)}">{"".join(boxes)}</svg></figure>'
    )


def ranks(runs: Sequence[Run]) -> Section | None:
    """What each rank did last, and the most memory that it took."""
    parts = [_ranks_of(run, len(runs) == 1) for run in runs if run.status]
    return Section("ranks", "Ranks and memory", "".join(parts)) if parts else None


def _ranks_of(run: Run, is_open: bool) -> str:
    headers = ["rank", "host", "step", "phase", "last sign", "waited for data", "host memory, peak"]
    on_device = any("device_peak_bytes" in entry for entry in run.status)
    headers += ["device memory, peak"] if on_device else []
    headers += ["planned"] if run.planned_memory else []
    rows = [
        [
            str(entry.get("rank", place)),
            entry.get("host"),
            entry.get("iteration"),
            entry.get("phase"),
            clock_time(float(entry.get("time", 0.0))),
            duration(entry.get("data_wait_seconds")),
            size(entry.get("peak_bytes")),
            *([size(entry.get("device_peak_bytes"))] if on_device else []),
            *([_planned(run, entry, on_device)] if run.planned_memory else []),
        ]
        for place, entry in enumerate(run.status[:MOST_RANKS])
    ]
    rest = note(f"The first {MOST_RANKS} of {len(run.status)} ranks.") if len(run.status) > MOST_RANKS else ""
    if run.planned_memory and not on_device:
        rest += note("Planned are tensors; host memory has the interpreter and its libraries as well.")
    return details(f"{run.name}: {counted(len(run.status), 'rank')}", table(headers, rows) + rest, is_open=is_open)


def _planned(run: Run, entry: Mapping[str, Any], on_device: bool) -> str:
    """Bytes planned for the rank, and the measured ones in percent of these on a device, which holds tensors alone."""
    stages = int(run.config.get("parallel.pipeline_model_parallel_size") or 1)
    world = int(run.environment.get("world_size") or len(run.status))
    # rank = ((pp * DP + dp) * CP + cp) * TP + tp
    planned = run.planned_memory.get(int(entry.get("rank", 0)) * stages // world)
    measured = entry.get("device_peak_bytes")
    percent = f" ({measured / planned:.0%} of it)" if on_device and planned and measured else ""
    return size(planned) + percent

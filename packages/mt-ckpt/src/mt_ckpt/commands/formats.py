"""What `mt quantization` prints of a checkpoint's files: how weights are stored, and what that has cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mt_ckpt.files.sizes import format_bytes
from mt_core.plugins import load_plugins

if TYPE_CHECKING:
    from mt_ckpt.layer_formats import FormatGroup, LayerFormat


def show_formats(path: Path, original: Path | None, loader: str, *, tensors: bool, as_json: bool) -> None:
    """Print what the weights of a checkpoint are stored as: format, bits a weight, error against an original.

    tensors: a line for each, not for those of all layers together. Raises CheckpointError for an original of another
    model.
    """
    from mt_ckpt.contents import open_any
    from mt_ckpt.layer_formats import grouped, layer_formats

    host = load_plugins()
    reader = open_any(path, host, loader).reader
    other = None if original is None else open_any(original, host).reader
    formats = layer_formats(reader, other)
    if as_json:
        typer.echo(json.dumps({"tensors": [_entry(entry) for entry in formats], **_totals(formats)}, indent=2))
        return
    for line in _tensor_lines(formats) if tensors else _group_lines(grouped(formats)):
        typer.echo(line)
    typer.echo(_summary(formats))


def _entry(entry: LayerFormat) -> dict[str, Any]:
    return {**asdict(entry), "bits_per_weight": round(entry.bits_per_weight, 4)}


def _totals(formats: Iterable[LayerFormat]) -> dict[str, Any]:
    entries = list(formats)
    numel, num_bytes = sum(entry.numel for entry in entries), sum(entry.num_bytes for entry in entries)
    return {
        "num_parameters": numel,
        "num_quantized_parameters": sum(entry.numel for entry in entries if entry.quantized),
        "num_bytes": num_bytes,
        "bits_per_weight": round(8 * num_bytes / max(1, numel), 4),
    }


def _summary(formats: list[LayerFormat]) -> str:
    totals = _totals(formats)
    number, share = totals["num_parameters"], totals["num_quantized_parameters"] / max(1, totals["num_parameters"])
    size, plain = format_bytes(totals["num_bytes"]), format_bytes(2 * number)
    bits = f"{totals['bits_per_weight']:.2f} bits a weight"
    return f"{number:,} parameters, {share:.1%} of them quantized; {size}, {bits}; with 16 bits it would be {plain}"


def _tensor_lines(formats: Iterable[LayerFormat]) -> list[str]:
    rows = [("parameter", "shape", "format", "bits", "bytes", "error", "largest")]
    for entry in formats:
        shape, largest = " x ".join(map(str, entry.shape)), entry.largest_error
        size, bits = format_bytes(entry.num_bytes), f"{entry.bits_per_weight:.2f}"
        last = "" if largest is None else f"{largest:.3g}"
        rows.append((entry.name, shape, entry.format, bits, size, _percent(entry.error), last))
    return _aligned(rows)


def _group_lines(groups: Iterable[FormatGroup]) -> list[str]:
    rows = [("parameter", "tensors", "format", "bits", "bytes", "error")]
    for group in groups:
        size, bits = format_bytes(group.num_bytes), f"{group.bits_per_weight:.2f}"
        rows.append((group.name, str(group.count), group.format, bits, size, _percent(group.error)))
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their longest entry, whatever the terminal: nothing is cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:.3%}"

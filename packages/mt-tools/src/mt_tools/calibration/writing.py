"""Writes a calibrated model as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_ckpt.convert.prepare import Request, prepare
from mt_ckpt.convert.source import Source
from mt_ckpt.hugging_face.save import save_folder
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.name_map import Rule
from mt_core.plugins import PluginHost
from mt_tools.calibration.store import CalibrationStore

REPORT = "calibration.json"
"""Beside the weights: what was done, and what it cost."""


class ChangedSource(Source):
    """The source with parameters that calibration has changed."""

    def __init__(self, source: Source, store: CalibrationStore) -> None:
        # Shares everything but `read`: no second opening of the checkpoint.
        self.__dict__.update(source.__dict__)
        self._store = store

    def external(self, name: str, rule: Rule) -> None:
        """No tensor is taken past `read`."""

    def read(self, name: str) -> Tensor:
        changed = self._store.changed(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        return super().read(name) if changed is None else changed.to(self.dtypes()[name])


def write_calibrated(
    checkpoint: Path, out: Path, scheme: str, store: CalibrationStore, report: Mapping[str, Any], host: PluginHost
) -> None:
    """On one rank. Raises what `mt convert` raises for the source and the scheme."""
    source = ChangedSource(prepare(Request(checkpoint), host).source, store)
    # A result is never resumed: its weights are of this calibration.
    del source.identity
    beside = {REPORT: (json.dumps(report, indent=2) + "\n").encode()}
    save_folder(out, source, ConvertOptions(quantize=scheme), host, calibrated=store, beside=beside)

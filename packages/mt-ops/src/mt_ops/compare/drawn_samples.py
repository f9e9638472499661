"""The samples that two runs draw, built from their stored configurations and compared by content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mt_core.config.loading import load_config_anywhere
from mt_core.data.building import build_tokenizer, build_train_data
from mt_core.errors import MtError
from mt_core.interfaces import Dataset
from mt_core.plugins import PluginHost, load_plugins
from mt_ops.reading.data_contents import CONTENT, DIGITS, data_paths, trained_data
from mt_ops.reading.mt_run import CONFIG
from mt_ops.reading.run import Run


@dataclass(frozen=True)
class DrawnSamples:
    """count: how many were compared. other: how the first that is not the same differs, None where all are. warnings:
    data sets that are no longer what the run was trained on."""

    count: int
    other: str | None
    warnings: Sequence[str] = ()

    @property
    def text(self) -> str:
        return self.other or f"the first {self.count} are the same, as the files are now"


def drawn_samples(a: Run, b: Run, count: int) -> DrawnSamples:
    """Compares `count` samples of data sets as they are built now. Raises MtError where one cannot be built here."""
    host = load_plugins()
    mine, theirs = (_data(run.path, host) for run in (a, b))
    warnings = [line for run, data in ((a, mine), (b, theirs)) for line in _changed(run, data)]
    number, other = 0, None
    for number, (first, second) in enumerate(zip(_hashes(mine, count), _hashes(theirs, count), strict=False), start=1):
        if first != second:
            place = number - 1
            other = f"sample {place} is {mine.describe(place)} in A and {theirs.describe(place)} in B"
            break
    return DrawnSamples(number, other, warnings)


def _changed(run: Run, data: Dataset) -> Iterator[str]:
    """Warnings of data that changed; files that a run recorded are compared by themselves."""
    trained, fingerprint = trained_data(run), getattr(data, "fingerprint", None)
    then = trained.identity.get(CONTENT)
    if then is not None and fingerprint is not None and not trained.files and (now := fingerprint()) != then:
        named, changed = ", ".join(data_paths(run.config)) or "its data", f"{then[:DIGITS]}, it is {now[:DIGITS]}"
        yield f"{named} is no longer what {run.name} was trained on: {CONTENT} was {changed}"


def _data(run: Path, host: PluginHost) -> Dataset:
    try:
        config = load_config_anywhere(run / CONFIG, host=host).config
        return build_train_data(config, build_tokenizer(config, host), host)
    except MtError as error:
        raise type(error)(f"the samples of {run} cannot be compared: {error}; --samples 0 leaves them out") from None


def _hashes(data: Dataset, count: int) -> Iterator[bytes]:
    for number in range(min(count, len(data))):
        sample, digest = data[number], hashlib.blake2b(digest_size=16)
        for name in sorted(sample):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(sample[name]).tobytes())
        yield digest.digest()

"""The samples that two runs draw, built from their stored configurations and compared by content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mt_core.config.loading import load_config_anywhere
from mt_core.data.building import build_tokenizer, build_train_data
from mt_core.errors import MtError
from mt_core.interfaces import Dataset
from mt_core.plugins import PluginHost, load_plugins
from mt_ops.reading.mt_run import CONFIG


def first_other_sample(a: Path, b: Path, count: int) -> str | None:
    """The first of `count` samples that is not the same in both run directories, described by their data sets; None
    where all are. Raises MtError where a data set cannot be built here."""
    host = load_plugins()
    mine, theirs = _data(a, host), _data(b, host)
    pairs = zip(_hashes(mine, count), _hashes(theirs, count), strict=False)
    for number, (first, second) in enumerate(pairs):
        if first != second:
            return f"sample {number} is {mine.describe(number)} in A and {theirs.describe(number)} in B"
    return None


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

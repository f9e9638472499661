"""The predictions of several models for the same samples as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mt_core.errors import DataError
from mt_eval.classification.predictions import SetPredictions, read_predictions


def read_ensemble(paths: Sequence[Path]) -> SetPredictions:
    """Mean probabilities, as their logarithms; of regressions the mean number.

    Raises DataError for files of other samples, labels or numbers of classes.
    """
    parts = [read_predictions(path) for path in paths]
    first = parts[0]
    for path, part in zip(paths[1:], parts[1:], strict=True):
        _require_same_samples(paths[0], first, path, part)
    if first.is_regression:
        outputs = np.mean([part.outputs for part in parts], axis=0)
    else:
        # The mean of probabilities, not of logits: the scale of logits differs between models. A softmax of the
        # logarithms gives the mean back, so that all that takes logits works. tiny: a probability of 0 has no
        # logarithm.
        outputs = np.log(np.mean([part.softmax() for part in parts], axis=0).clip(min=np.finfo(np.float32).tiny))
    truncated = np.any([part.truncated for part in parts], axis=0)
    return replace(first, outputs=outputs.astype(np.float32), truncated=truncated)


def _require_same_samples(first: Path, ours: SetPredictions, path: Path, theirs: SetPredictions) -> None:
    if ours.outputs.shape[1] != theirs.outputs.shape[1]:
        raise DataError(
            f"{first} has {ours.outputs.shape[1]} logits a sample and {path} has {theirs.outputs.shape[1]}; an "
            "ensemble is of models of the same task"
        )
    # Files are in the order of their uids, see `of_set`, so that equal sets have equal arrays.
    if not np.array_equal(ours.uids, theirs.uids):
        differing = sorted(set(ours.uids.tolist()) ^ set(theirs.uids.tolist()))[:5]
        which = f", such as {', '.join(map(str, differing))}" if differing else ""
        raise DataError(f"{first} and {path} have predictions for different samples{which}; give files of the same set")
    if not np.array_equal(ours.labelled, theirs.labelled) or not np.array_equal(ours.labels, theirs.labels):
        raise DataError(f"{first} and {path} have different labels for the same samples; give files of the same set")

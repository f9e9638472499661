"""Files of predictions (a line of JSON for each sample, with outputs and label), and ensembles of several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.paths import write_whole

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SetPredictions:
    """Predictions for the N samples of one set, by uid.

    outputs: [N, C], logits, or [N, 1] of a regression. labels, labelled: [N],
    where `labelled` is false there is no label. truncated: [N], whether the texts were cut."""

    uids: NDArray[np.int64]
    outputs: Floats
    labels: NDArray[Any]
    labelled: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    @property
    def is_regression(self) -> bool:
        return self.outputs.shape[1] == 1

    def softmax(self) -> Floats:
        """[N, C] probabilities of the classes."""
        return softmax(self.outputs)

    def predicted(self) -> NDArray[Any]:
        """[N]: the number, or the number of the likeliest class."""
        return self.outputs[:, 0] if self.is_regression else self.outputs.argmax(-1)


def softmax(logits: Floats) -> Floats:
    # Less the maximum: exp of a large logit overflows.
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def write_predictions(path: Path, predictions: SetPredictions) -> None:
    """uid, prediction, label (null without one), logits, softmax (not of a regression) and truncated of each sample."""
    path.parent.mkdir(parents=True, exist_ok=True)
    predicted = predictions.predicted()
    probabilities = None if predictions.is_regression else predictions.softmax()
    lines = (
        {
            "uid": int(predictions.uids[n]),
            "prediction": predicted[n].item(),
            "label": predictions.labels[n].item() if predictions.labelled[n] else None,
            "logits": predictions.outputs[n].tolist(),
            **({} if probabilities is None else {"softmax": probabilities[n].tolist()}),
            "truncated": bool(predictions.truncated[n]),
        }
        for n in range(len(predictions.uids))
    )
    # At once: a killed process leaves no file with a part of the samples.
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def write_table(path: Path, predictions: SetPredictions) -> None:
    """Tab-separated columns id and label, as GLUE's server takes them, with numbers of classes."""
    rows = zip(predictions.uids.tolist(), predictions.predicted().tolist(), strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(["id\tlabel\n", *(f"{uid}\t{label}\n" for uid, label in rows)]).encode())


def read_predictions(path: Path) -> SetPredictions:
    """Raises DataError for a file that `write_predictions` did not write."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1)]
    if not rows:
        raise DataError(f"{path} has no predictions")
    widths = {len(row["logits"]) for row in rows}
    if len(widths) > 1:
        raise DataError(f"{path} has lines with {' and '.join(map(str, sorted(widths)))} logits; all must have as many")
    # -1 stands for none; `labelled` says so.
    labels = [-1 if row["label"] is None else row["label"] for row in rows]
    return SetPredictions(
        np.array([row["uid"] for row in rows], np.int64),
        np.array([row["logits"] for row in rows], np.float32),
        # Labels of a regression are numbers, of classes their indices.
        np.array(labels, np.float32 if widths == {1} else np.int64),
        np.array([row["label"] is not None for row in rows]),
        np.array([bool(row["truncated"]) for row in rows]),
    )


def _row(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
        return {key: row[key] for key in ("uid", "label", "logits", "truncated")}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}, line {number}: no prediction with uid, label, logits and truncated, as "
            "mt eval classification --predictions writes them"
        ) from error


# -- ensembles ---------------------------------------------------------------------------------------


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

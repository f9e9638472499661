"""What lm_eval logs of a document, as a sample of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from lm_eval.utils import handle_non_serializable

from mt_eval.tasks import Sample

BYTES, LOG_LIKELIHOOD = "byte_perplexity", "log_likelihood"
DETAILS = ("doc", "target", "arguments", "resps", "filtered_resps")


def samples_of(logged: Iterable[Mapping[str, Any]], with_details: bool) -> list[Sample]:
    """One for each document; of its metrics those that are numbers, under the names of the results ("acc,none").

    Of a text whose byte perplexity is measured: log_likelihood of a byte, weighted by the number of bytes. logged: an
    entry for each document and filter.
    """
    found: dict[int, Sample] = {}
    for entry in logged:
        number = entry["doc_id"]
        values, weight = _values(entry)
        # One entry per filter; the values of a document's filters are put together.
        before = found.get(number)
        details = _details(entry) if with_details else {}
        found[number] = Sample(
            f"document {number}",
            {**(before.values if before else {}), **values},
            weight,
            details={**(before.details if before else {}), **details},
        )
    return list(found.values())


def _values(entry: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """Metrics, and the sample's weight."""
    kept, weight = {}, 1.0
    for metric in entry["metrics"]:
        value = entry[metric]
        # Others are intermediate values, such as (log-likelihood, bytes), that lm_eval aggregates itself.
        if isinstance(value, Real):
            kept[f"{metric},{entry['filter']}"] = float(value)
        elif metric == BYTES:
            log_likelihood, num_bytes = value
            # Per byte, with the bytes as weight: the weighted mean is the corpus' value.
            kept[LOG_LIKELIHOOD], weight = log_likelihood / num_bytes, float(num_bytes)
    return kept, weight


def _details(entry: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values."""
    return {
        entry["filter"]: json.loads(json.dumps({key: entry[key] for key in DETAILS}, default=handle_non_serializable))
    }

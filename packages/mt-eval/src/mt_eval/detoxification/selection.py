"""The least toxic share of generated texts, as a training set."""

from __future__ import annotations

import json
import random
from pathlib import Path

from mt_core.errors import DataError
from mt_core.paths import write_whole
from mt_eval.detoxification.annotation import COMPLETIONS, TEXT, read_lines
from mt_eval.detoxification.metrics import ATTRIBUTE, score_of


def select_least_toxic(source: Path, target: Path, share: float, seed: int, attribute: str = ATTRIBUTE) -> int:
    """Writes {"text": ...} of the least toxic texts in random order; returns their number, floor(share * all texts).

    Those without a score count among all texts, and are not taken. Raises DataError when none is taken, and for scores
    without the attribute.
    """
    texts = [completion for line in read_lines(source) for completion in line.get(COMPLETIONS, [])]
    # The place breaks ties between equal scores, so that the choice depends on nothing else.
    scores = ((score_of(one, attribute), place, one[TEXT]) for place, one in enumerate(texts))
    scored = [(score, place, text) for score, place, text in scores if score is not None]
    kept = sorted(scored)[: int(share * len(texts))]
    if not kept:
        raise DataError(
            f"{source}: {len(scored)} of {len(texts)} texts have a score, and a share of {share} keeps none; generate "
            "more texts, or keep a larger share"
        )
    # Shuffled: in the order of scores a training run would see the least toxic texts first.
    random.Random(seed).shuffle(kept)
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for _, _, text in kept]
    write_whole(target, "".join(lines).encode())
    return len(kept)

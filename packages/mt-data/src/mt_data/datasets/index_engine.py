"""Which program builds the index of a GPT data set: NumPy, or loops that numba compiles. The arrays are the same."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError
from mt_data.datasets.gpt_index import GPTIndex, GPTIndexPlan, Progress, build_gpt_index

IndexEngine = Literal["auto", "numpy", "numba"]
WORTH_COMPILING = 20_000_000
"""Documents times epochs from which on the time that numba saves is more than the time that it takes to start."""
log = logging.getLogger(__name__)


def build_index(
    engine: IndexEngine,
    elements: range,
    sequence_lengths: NDArray[np.int32],
    plan: GPTIndexPlan,
    progress: Progress | None = None,
) -> GPTIndex:
    """`gpt_index.build_gpt_index` by the engine; "auto" takes numba where it is installed and worth it, and says so.

    Raises ConfigError for "numba" where it is not installed.
    """
    chosen = _resolved(engine, len(elements) * plan.epochs)
    if chosen == "numpy":
        return build_gpt_index(elements, sequence_lengths, plan, progress)
    # Imports numba, which is an extra of mt-data and slow to import.
    from mt_data.datasets.compiled_index import build_compiled_index

    return build_compiled_index(elements, sequence_lengths, plan, progress)


def _resolved(engine: IndexEngine, count: int) -> Literal["numpy", "numba"]:
    installed = find_spec("numba") is not None
    if engine == "numba" and not installed:
        raise ConfigError(
            'data.index_engine="numba" needs numba: pip install "mt-data[fast]", or set "auto" or "numpy"'
        )
    if engine != "auto":
        return engine
    # Beyond 32 bits the compiled shuffle does not go.
    chosen: Literal["numpy", "numba"] = "numba" if installed and WORTH_COMPILING <= count <= 1 << 32 else "numpy"
    if count >= WORTH_COMPILING:
        log.info(
            'data.index_engine="auto" is %s for %d documents%s',
            chosen,
            count,
            "" if installed else ' (pip install "mt-data[fast]" for a faster one)',
        )
    return chosen

"""How a task of lm_eval has texts generated, as sampling parameters of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from mt_core.errors import ConfigError, did_you_mean
from mt_infer.sampling.parameters import SamplingParameters

MAX_GEN_TOKS = 256
"""lm_eval's default for tasks that do not say."""
OF_HARNESS = ("until", "do_sample", "max_gen_toks", "temperature")
RENAMED = {"min_new_tokens": "min_tokens"}
"""transformers' word -> the engine's."""
SAME_NAME = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "num_beams",
    "length_penalty",
    "early_stopping",
)


def sampling_of(gen_kwargs: Mapping[str, Any], seed: int) -> SamplingParameters:
    """Greedy, unless `do_sample` or a temperature above 0 is given. The end of a document ends a text too.

    Raises ConfigError for a keyword that the engine has not, and for values that it does not take.
    """
    try:
        given: dict[str, Any] = {**normalize_gen_kwargs(dict(gen_kwargs), MAX_GEN_TOKS)}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"gen_kwargs: {error}; check their values in --gen-kwargs") from error
    # normalize_gen_kwargs always sets do_sample, until and max_gen_toks.
    is_sampled, temperature = given.pop("do_sample"), given.pop("temperature", 1.0)
    # An empty stop text would end every answer before it begins.
    stop = tuple(text for text in given.pop("until") if text)
    max_tokens = given.pop("max_gen_toks")
    named: dict[str, Any] = {RENAMED.get(name, name): value for name, value in given.items()}
    for name in named:
        if name not in (*SAME_NAME, *RENAMED.values()):
            known = [*OF_HARNESS, *RENAMED, *SAME_NAME]
            raise ConfigError(
                f"gen_kwargs: {name}{did_you_mean(name, known)} is no option of the engine; it has {', '.join(known)}"
            )
    temperature = temperature if is_sampled else 0.0
    return SamplingParameters(temperature=temperature, max_tokens=max_tokens, stop=stop, seed=seed, **named)

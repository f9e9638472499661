"""`mt ctl RUN generate TEXT`: text from the model of a running training."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator


def answer_generate(run: Any, argument: str, by: str) -> str:
    """run: a mt_core.train.run_control.ControlledRun. Collective over the world."""
    prompt = argument or run.config.train.sample_prompt
    if not prompt:
        raise ConfigError("mt ctl RUN generate TEXT needs a text, or train.sample_prompt")
    training = run.model.training
    # For each request anew, so that a run keeps no cache between requests.
    generator = TextGenerator.of_engine(run.engine)
    train = run.config.train
    sampling = SamplingParameters(temperature=0.8, top_k=50, seed=train.seed, max_tokens=train.sample_tokens)
    try:
        ((completion, *_),) = generator.generate([prompt], sampling)
    finally:
        run.model.train(training)
    run.event("sample", prompt=prompt, text=completion.text)
    return f"{prompt}{completion.text}"

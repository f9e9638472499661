"""`mt ctl RUN generate TEXT`: text from the model of a running training."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_core.parallel.context import Axis
from mt_core.parallel.first_rank import on_first_rank
from mt_core.train.sample_prompt import sample_prompt
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator


def answer_generate(run: Any, argument: str, by: str) -> str:
    """run: a mt_core.train.run_control.ControlledRun. Collective over the world."""
    prompt = argument or sample_prompt(run.config, run.engine.tokenizer, run.validation.sets)
    if not prompt:
        raise ConfigError("mt ctl RUN generate TEXT needs a text, or train.sample_prompt")
    training = run.model.training
    # For each request anew, so that a run keeps no cache between requests.
    generator = TextGenerator.of_engine(run.engine)
    train = run.config.train
    sampling = SamplingParameters(temperature=0.8, top_k=50, seed=train.seed, max_tokens=train.sample_tokens)
    try:
        text = _text_on_all_ranks(generator, prompt, sampling, run.ctx.world)
    finally:
        run.model.train(training)
    run.event("sample", prompt=prompt, text=text)
    return f"{prompt}{text}"


def _text_on_all_ranks(generator: TextGenerator, prompt: str, sampling: SamplingParameters, world: Axis) -> str:
    """Collective over `world`: rank 0 makes the request, and the others compute their parts of it until it closes."""

    def generated() -> str:
        try:
            ((completion, *_),) = generator.generate([prompt], sampling)
        finally:
            generator.close()
        return completion.require_complete().text

    # Tokens of data-parallel replicas reach rank 0 alone: no other rank would see its request end.
    if world.rank != 0:
        generator.follow()
    return on_first_rank(generated, world)

"""The text from the new model that `mt train` prints at the end."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer

from mt_core.config.schema import AUTO_PROMPT
from mt_core.errors import ConfigError, MtError
from mt_core.nn.model import contract
from mt_core.train.sample_prompt import sample_prompt

if TYPE_CHECKING:
    from mt_core.train.trainer import Trainer
    from mt_infer.text import TextGenerator

KEY = "train.sample_prompt"


def prompt_of_sample(trainer: Trainer) -> str | None:
    """train.sample_prompt, which is checked before training. None where there is no sample: of a model that continues
    no text, without mt-infer, and where the tokenizer cannot encode the prompt that `auto` chose.

    Raises ConfigError for any other prompt that the tokenizer cannot encode.
    """
    prompt = sample_prompt(trainer.config, trainer.engine.tokenizer, trainer.valid_data)
    if not prompt or find_spec("mt_infer") is None or not contract(trainer.model).continues_text:
        return None
    try:
        trainer.engine.tokenizer.encode(prompt)
    except MtError as error:
        # A prompt that the user chose must work; the default one need not suit every tokenizer.
        if trainer.config.train.sample_prompt == AUTO_PROMPT:
            return None
        raise ConfigError(
            f"{KEY}={prompt!r} (from {trainer.loaded.origin(KEY)}) cannot be encoded: {error}; "
            f"choose another prompt, or {KEY}=null for no text at the end"
        ) from error
    return prompt


def continues(trainer: Trainer, prompt: str) -> bool:
    """Whether the model can continue this text."""
    try:
        trainer.engine.tokenizer.encode(prompt)
    except MtError:
        return False
    return contract(trainer.model).continues_text


def print_sample(trainer: Trainer, prompt: str) -> None:
    """A text from the model, printed as it comes. One that fails is a warning: the run itself has succeeded."""
    typer.echo("\nA sample:\n")
    try:
        _print_text(trainer, prompt)
    except Exception as error:  # the checkpoint is written, and the exit code belongs to training
        typer.echo(f"\nwarning: no text was generated: {type(error).__name__}: {error}", err=True)


def _print_text(trainer: Trainer, prompt: str) -> None:
    from mt_infer.sampling.parameters import SamplingParameters

    generator, train = _generator(trainer), trainer.config.train
    room = generator.longest - len(trainer.engine.tokenizer.encode(prompt))
    typer.echo(prompt, nl=False)
    if room > 0:
        tokens = min(train.sample_tokens, room)
        sampling = SamplingParameters(temperature=0.8, top_k=50, seed=train.seed, max_tokens=tokens)
        for piece in generator.stream(prompt, sampling):
            typer.echo(piece, nl=False)
    typer.echo()


def _generator(trainer: Trainer) -> TextGenerator:
    """A generator of the model on this process alone: with several ranks, from the checkpoint that training wrote."""
    from mt_core.train.trained_model import load_trained_model
    from mt_infer.text import TextGenerator

    if trainer.ctx.world.size == 1:
        return TextGenerator.of_engine(trainer.engine)
    assert trainer.directory is not None
    # Generating on the trainer's sharded model would need all ranks; this runs on one, which reads the whole model.
    trained = load_trained_model(trainer.directory.checkpoints, trainer.host, device=trainer.engine.device.type)
    return TextGenerator.of_model(trained.model, trained.tokenizer, trained.config, trained.ctx)

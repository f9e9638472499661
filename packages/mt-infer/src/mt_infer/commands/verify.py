"""`mt verify generation`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import need
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks, start_ranks

if TYPE_CHECKING:
    from mt_core.train.trained_model import TrainedModel
    from mt_infer.speculation.building import DraftModel
    from mt_infer.verify_generation import Difference

TEXT = "The quick brown fox jumps over the lazy dog. "


def verify_generation(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PATH", help="A run directory, or a checkpoint of any format.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable. Default: some of its own.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to sample for each prompt.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    set_: SETTINGS = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    nproc: NPROC = None,
) -> None:
    """Sample from a model one request at a time, together, in chunks, with prefixes and preemption, and compare.

    With --set inference.batch_invariant=true all tokens and log-probabilities have to be the same bits, and those of
    training's forward pass; without it the largest difference of log-probabilities is printed. Exit code 1 when more
    differs than that. The engine is the one that `mt serve` builds with the same --set: quantized weights, draft model.
    """
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt verify generation")
    from mt_core.launch.session import rank_session
    from mt_core.plugins import load_plugins
    from mt_core.train.build import resolve_device
    from mt_core.train.trained_model import load_trained_model
    from mt_infer.speculation.loading import load_draft_model
    from mt_infer.text import longest_sequence, prepare_weights

    start_ranks(context, nproc)
    settings = layout_of_ranks(engine_settings(set_ or []))
    with rank_session(resolve_device(device).type):
        host = load_plugins()
        trained = load_trained_model(path, host, device=device, settings=settings)
        longest = longest_sequence(trained.config, trained.model)
        require_prompt_positions(max_tokens, longest)
        prepare_weights(trained)
        draft = load_draft_model(trained, longest, host, device=device, settings=settings)
        prompts = [list(trained.tokenizer.encode(text))[: longest - max_tokens] for text in prompt or own_texts()]
        code = _verify(trained, draft, prompts, max_tokens, seed)
    raise typer.Exit(code)


def require_prompt_positions(max_tokens: int, longest: int) -> None:
    if max_tokens >= longest:
        raise ConfigError(
            f"--max-tokens {max_tokens} leaves no position for a prompt: sequences have at most {longest} positions "
            f"(inference.max_sequence_length, the model's); it can be at most {longest - 1}"
        )


def _verify(
    trained: TrainedModel, draft: DraftModel | None, prompts: list[list[int]], max_tokens: int, seed: int
) -> int:
    """The exit code: 0 if no more differs than may."""
    from mt_core.parallel.context import is_writer
    from mt_infer.runner import placed_stages
    from mt_infer.verify_generation import compare_ways, tolerance_of

    placed = placed_stages(trained.stages, trained.ctx)
    found = compare_ways(trained, placed, prompts, max_tokens, seed, draft)
    if not is_writer():
        return 0
    tolerance = tolerance_of(trained.config)
    for difference in found:
        typer.echo(f"{difference.way}: {described(difference)}")
    allowed = all(difference.is_allowed(tolerance) for difference in found)
    what = "the same bits" if tolerance == 0 else f"within {tolerance:g}"
    typer.echo(f"{len(prompts)} requests of {max_tokens} tokens: {'' if allowed else 'NOT '}{what}")
    return 0 if allowed else 1


def own_texts() -> list[str]:
    """Of several lengths, some of which begin alike."""
    return [TEXT, TEXT * 3, TEXT[:20], TEXT * 2 + "It"]


def described(difference: Difference) -> str:
    if difference.place is None:
        return "no difference"
    what = "other tokens" if difference.tokens_differ else "the same tokens"
    return (
        f"{what}, log-probabilities off by up to {difference.off:.1e}; first in request {difference.request} at "
        f"position {difference.place}"
    )

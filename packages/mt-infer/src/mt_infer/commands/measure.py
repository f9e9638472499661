"""Commands that measure and check an engine: `mt bench generate`, `mt quantization`, `mt verify generation`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import need
from mt_core.errors import ConfigError, DataError
from mt_core.paths import as_path, writing
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks, on_ranks, start_ranks

if TYPE_CHECKING:
    from mt_core.train.trained_model import TrainedModel
    from mt_infer.measurements import LoadResult
    from mt_infer.speculation.building import DraftModel
    from mt_infer.text import TextGenerator
    from mt_infer.verify_generation import Difference


def bench_generate(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PATH", help="A run directory, or a checkpoint of any format.")
    ],
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 32,
    rate: Annotated[float, typer.Option(min=0.0, help="Arrivals a second, at random times; 0: all at once.")] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt; the shortest is a quarter.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 32,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
    set_: SETTINGS = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    nproc: NPROC = None,
) -> None:
    """Measure the engine under a load: tokens per second, time to the first token and between tokens.

    Random prompts of several lengths arrive in a Poisson process. With --rate 0 the engine is full from the start.
    """
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt bench generate")

    def use(generator: TextGenerator) -> None:
        from mt_infer.measurements import arrivals, run_load

        prompts = random_prompts(generator, requests, prompt_tokens, max_tokens, seed)
        run_load(generator, prompts[:1], min(max_tokens, 4), [0.0])  # kernels and memory are warm then
        result = run_load(generator, prompts, max_tokens, arrivals(requests, rate or float("inf"), seed))
        values = as_values(result)
        typer.echo("\n".join(f"{name}: {value}" for name, value in values.items()))
        if out is not None:
            with writing(out, "--out"):
                out.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    on_ranks(context, path, engine_settings(set_ or []), device, nproc, use)


def random_prompts(generator: TextGenerator, count: int, longest: int, max_tokens: int, seed: int) -> list[list[int]]:
    """Ids drawn at random, from a quarter of the longest length up; within the engine's longest sequence."""
    import random

    draw = random.Random(seed)
    longest = max(min(longest, generator.longest - max_tokens), 1)
    size = generator.config.model.vocab_size or generator.tokenizer.vocab_size
    lengths = [draw.randint(max(longest // 4, 1), longest) for _ in range(count)]
    return [[draw.randrange(size) for _ in range(length)] for length in lengths]


def as_values(result: LoadResult) -> dict[str, Any]:
    first = result.percentiles(lambda request: [request.first])
    gaps = result.percentiles(lambda request: request.gaps)
    return {
        "requests": len(result.requests),
        "tokens_per_second": round(result.tokens_per_second, 1),
        "seconds": round(result.seconds, 3),
        "outside_forward_passes": round(result.outside, 4),
        **{f"first_token_p{share}_ms": round(value * 1e3, 2) for share, value in first.items()},
        **{f"between_tokens_p{share}_ms": round(value * 1e3, 2) for share, value in gaps.items()},
    }


def quantization(
    path: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PATH", help="A run directory, or a checkpoint of any format.")
    ],
    text: Annotated[
        Path | None,
        typer.Argument(parser=as_path, metavar="[FILE]", help="A text in UTF-8, read to its end, for perplexities."),
    ] = None,
    original: Annotated[
        Path | None,
        typer.Option(parser=as_path, metavar="PATH", help="Without FILE: the unquantized model, to show errors."),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Without FILE: a line for each tensor.")] = False,
    loader: Annotated[str, typer.Option(help="Without FILE: the format to read; auto recognizes it.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Without FILE: print JSON, with every tensor.")] = False,
    set_: SETTINGS = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Show what the weights in a checkpoint's files are stored as: format, bits a weight, error against an original.

    With FILE: what quantizing weights and cache while serving costs in perplexity, and what it saves.
    """
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt quantization")
    if text is None:
        from mt_ckpt.commands.formats import show_formats

        if set_ or device != "auto":
            raise ConfigError("mt quantization: --set and --device are for perplexities; give FILE too")
        show_formats(path, original, loader, tensors=tensors, as_json=as_json)
        return
    if original is not None or tensors or as_json or loader != "auto":
        raise ConfigError(
            "mt quantization: --original, --tensors, --loader and --json show what is in files; leave FILE out"
        )
    from mt_infer.measurements import measure

    settings = engine_settings(set_ or [])
    typer.echo(f"{'form':14} {'perplexity':>10} {'loss':>8} {'weights':>12} {'position':>10}  products")
    base = 0.0
    for result in measure(path, read_text(text), device, settings):
        base = base or result.perplexity
        loss = f"{result.perplexity / base - 1:+.2%}"
        weights, position = f"{result.weights / 2**20:.3f} MiB", f"{result.position} B"
        row = f"{result.name:14} {result.perplexity:10.4f} {loss:>8} {weights:>12} {position:>10}  {result.product}"
        typer.echo(row.rstrip())


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}") from error


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

    With --set numerics.batch_invariant=true all tokens and log-probabilities have to be the same bits, and those of
    training's forward pass; without it the largest difference of log-probabilities is printed. Exit code 1 when more
    differs than that. The engine is the one that `mt serve` builds with the same --set: quantized weights, draft model.
    """
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt verify generation")
    from mt_core.launch.session import rank_session
    from mt_core.plugins import load_plugins
    from mt_core.train.build import resolve_device
    from mt_core.train.trained_model import load_trained_model
    from mt_infer.speculation.building import load_draft_model
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
    differences = compare_ways(trained, placed, prompts, max_tokens, seed, draft)
    if not is_writer():
        return 0
    tolerance = tolerance_of(trained.config)
    for difference in differences:
        typer.echo(f"{difference.way}: {described(difference)}")
    allowed = all(difference.is_allowed(tolerance) for difference in differences)
    what = "the same bits" if tolerance == 0 else f"within {tolerance:g}"
    typer.echo(f"{len(prompts)} requests of {max_tokens} tokens: {'' if allowed else 'NOT '}{what}")
    return 0 if allowed else 1


def own_texts() -> list[str]:
    """Texts of several lengths, some of which begin alike."""
    return [TEXT, TEXT * 3, TEXT[:20], TEXT * 2 + "It"]


def described(difference: Difference) -> str:
    if difference.place is None:
        return "no difference"
    what = "other tokens" if difference.tokens_differ else "the same tokens"
    return (
        f"{what}, log-probabilities off by up to {difference.off:.1e}; first in request {difference.request} at "
        f"position {difference.place}"
    )

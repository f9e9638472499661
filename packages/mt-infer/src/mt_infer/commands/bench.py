"""`mt bench generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import need
from mt_core.paths import as_path, writing
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, on_ranks

if TYPE_CHECKING:
    from mt_infer.load_test import LoadResult
    from mt_infer.text import TextGenerator


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
        from mt_infer.load_test import arrivals, run_load

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
    first = result.percentiles(lambda one: [one.first])
    gaps = result.percentiles(lambda one: one.gaps)
    return {
        "requests": len(result.requests),
        "tokens_per_second": round(result.tokens_per_second, 1),
        "seconds": round(result.seconds, 3),
        "outside_forward_passes": round(result.outside, 4),
        **{f"first_token_p{share}_ms": round(value * 1e3, 2) for share, value in first.items()},
        **{f"between_tokens_p{share}_ms": round(value * 1e3, 2) for share, value in gaps.items()},
    }

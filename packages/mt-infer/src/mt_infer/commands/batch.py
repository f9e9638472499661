"""`mt generate --input FILE --output FILE`, and unconditional samples."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TextColumn

from mt_core.errors import ConfigError
from mt_core.paths import writing
from mt_infer.commands.progress import progress_bar

if TYPE_CHECKING:
    from mt_infer.batch_files import Progress
    from mt_infer.sampling.parameters import SamplingParameters
    from mt_infer.text import TextGenerator


def check_files(source: Path | None, target: Path | None, prompts: list[str], num_samples: int | None) -> None:
    """Raises ConfigError for options that do not go together, before a model is loaded."""
    if source is None and num_samples is None:
        if target is not None:
            raise ConfigError("--output takes the completions of --input or --num-samples; give one of them")
        return
    if target is None:
        raise ConfigError(f"{'--input' if source else '--num-samples'} needs --output, the file of completions")
    if prompts or (source is not None and num_samples is not None):
        raise ConfigError("prompts come from one place: give --prompt, --input or --num-samples")
    if source is not None and not source.exists():
        raise ConfigError(f"--input {source}: no such file")
    if not target.parent.exists():
        raise ConfigError(f"--output {target}: there is no folder {target.parent}")


def write_samples_input(target: Path, count: int) -> Path:
    """A file of `count` empty prompts beside the output, which start a document each."""
    source = target.with_name(target.name + ".prompts.jsonl")
    with writing(source, "--output"):
        source.write_text((json.dumps({"prompt": ""}) + "\n") * count, encoding="utf-8")
    return source


def run_file(generator: TextGenerator, source: Path, target: Path, sampling: SamplingParameters) -> None:
    """With progress on standard error, and a summary."""
    from mt_infer.batch_files import count_lines, generate_file

    console = Console(stderr=True)
    started = time.monotonic()
    with progress_bar(TextColumn("{task.fields[rate]}")) as bar:
        task = bar.add_task("lines", total=count_lines(source), rate="")

        def show(progress: Progress) -> None:
            rate = progress.tokens / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=progress.lines, rate=f"{rate:,.0f} tokens/s")

        done = generate_file(generator, source, target, sampling, show)
    seconds = time.monotonic() - started
    failed = f"; {done.failed} could not be served (their lines have an error)" if done.failed else ""
    console.print(f"{target}: {done.lines:,} lines, {done.tokens:,} tokens in {seconds:.1f} s{failed}", soft_wrap=True)

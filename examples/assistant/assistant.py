"""The whole life of a small assistant, with the commands of mt: python assistant.py [--short] [--folder assistant]

Documentation that every Python carries becomes a tokenizer and a corpus; a language model is trained on it, tuned on
instructions and on preferences, evaluated after each stage, reported, exported for transformers and served. --short
does the same with few modules and few steps, in which little is learned. The same command goes on after the last stage
that is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("pretrained", "instructed", "preferred")
TOKENIZER = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --append-eod"


@dataclass(frozen=True)
class Size:
    """packages: modules to take, all without any. steps: of pretraining, instructions and preferences. settings: of
    each training. pretraining: further ones of the first."""

    packages: str = ""
    vocabulary: int = 2048
    steps: tuple[int, int, int] = (1200, 300, 60)
    settings: str = ""
    pretraining: str = ""


SHORT = Size(
    packages="json string textwrap shutil",
    vocabulary=400,
    steps=(6, 6, 4),
    settings="--set train.eval_interval=null --set checkpoint.save_interval=null --set lr_schedule.lr_warmup_iters=1",
    pretraining="--set model.num_layers=1 --set model.hidden_size=32 --set model.ffn_hidden_size=64",
)


@dataclass(frozen=True)
class Stage:
    """Commands with a name."""

    name: str
    commands: Sequence[str]


def data(size: Size) -> Stage:
    vocabulary = f"--vocab-size {size.vocabulary}"
    return Stage(
        "data",
        [
            f"python documents.py documents {size.packages}",
            "mt data clean 'documents/*.jsonl' -o cleaned --preset none --set fix_text=true --set min_words=20",
            "mt data dedup 'cleaned/*.jsonl' -o unique",
            "mt data train-tokenizer --kind bpe --format huggingface --input unique/train.jsonl "
            f"{vocabulary} --output tokenizer",
            f"mt data preprocess --input unique/train.jsonl --output-prefix corpus {TOKENIZER}",
            f"mt data preprocess --input unique/valid.jsonl --output-prefix held-out {TOKENIZER}",
            f"python questions.py questions {size.packages}",
        ],
    )


def pretraining(size: Size) -> Stage:
    length = f"--set train.train_iters={size.steps[0]} {size.settings} {size.pretraining}"
    return Stage("pretraining", [f"mt train pretrain.toml --run-dir runs/pretrained {length}"])


def instructions(size: Size) -> Stage:
    return Stage(
        "instructions",
        [
            "mt tune sft runs/pretrained questions/train.jsonl --valid questions/valid.jsonl --template plain "
            f"--steps {size.steps[1]} --batch-size 8 --lr 2e-3 --run-dir runs/instructed {size.settings}"
        ],
    )


def preferences(size: Size) -> Stage:
    return Stage(
        "preferences",
        [
            "mt tune dpo runs/instructed questions/pairs.jsonl --valid questions/valid-pairs.jsonl --template plain "
            f"--steps {size.steps[2]} --batch-size 8 --lr 1e-4 --set data.on_too_long=drop --run-dir runs/preferred "
            f"{size.settings}"
        ],
    )


def evaluation(name: str) -> Stage:
    """Bits a byte of held-out documents, and greedy answers to held-out questions."""
    run, results = f"runs/{name}", f"results/{name}"
    prompts = f"--input questions/prompts.jsonl --output {results}.jsonl"
    return Stage(
        f"evaluation of {name}",
        [
            f"mt eval ppl {run} --data text=unique/valid.jsonl --output {results}-text.json",
            f"mt generate {run} {prompts} --temperature 0 --max-tokens 60",
            f"mt eval generation {results}.jsonl --metric f1 --reference-key answer --output {results}-answers.json",
        ],
    )


def outcome() -> Stage:
    runs = " ".join(f"runs/{name}" for name in NAMES)
    return Stage(
        "outcome",
        [
            f"python results.py results {' '.join(NAMES)}",
            f"mt report {runs} -o report.html",
            f"mt plot {runs} --metric loss --smooth 10 -o loss.svg",
            "mt convert --loader auto --load-dir runs/preferred --saver hf --save-dir assistant",
            "python same_text.py assistant results/preferred.jsonl",
            "python served.py assistant",
        ],
    )


def stages(size: Size) -> Iterator[Stage]:
    yield data(size)
    for train, name in zip((pretraining, instructions, preferences), NAMES, strict=True):
        yield train(size)
        yield evaluation(name)
    yield outcome()


# -- running them --------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Seconds of each complete stage: by the clock on the wall, and of processors. path: the file that keeps them."""

    path: Path
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    def run(self, stage: Stage, folder: Path) -> None:
        wall, processors = time.monotonic(), cpu_seconds()
        print(f"\n# {stage.name}")
        for command in stage.commands:
            print(f"$ {' '.join(command.split())}", flush=True)
            run(shlex.split(command), folder)
        self.seconds[stage.name] = (time.monotonic() - wall, cpu_seconds() - processors)
        self.path.write_text(json.dumps(self.seconds, indent=2) + "\n")

    def show(self) -> None:
        total = [sum(of_stage[place] for of_stage in self.seconds.values()) for place in (0, 1)]
        print("\n# seconds, and seconds of processors")
        for name, (wall, processors) in {**self.seconds, "all": total}.items():
            print(f"{name:28}{wall:8.0f}{processors:8.0f}")


def cpu_seconds() -> float:
    """Of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def run(words: list[str], folder: Path) -> None:
    """One command in the folder; the first that fails ends the whole."""
    program = sys.executable if words[0] == "python" else words[0]
    subprocess.run([program, *words[1:]], cwd=folder, check=True)


def prepare(folder: Path) -> Clock:
    """The folder with the files of this example, so that commands name them as a reader would; the stages that are
    complete there."""
    (folder / "results").mkdir(parents=True, exist_ok=True)
    for path in HERE.iterdir():
        if path.suffix in (".py", ".toml") and path.name != Path(__file__).name:
            shutil.copy(path, folder)
    times = folder / "seconds.json"
    return Clock(times, json.loads(times.read_text()) if times.exists() else {})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="few modules and few steps, to see that it works")
    parser.add_argument("--folder", type=Path, default=Path("assistant"), help="the folder for everything")
    options = parser.parse_args(arguments)
    clock = prepare(options.folder)
    for stage in stages(SHORT if options.short else Size()):
        if stage.name not in clock.seconds:
            clock.run(stage, options.folder)
    clock.show()


if __name__ == "__main__":
    main()

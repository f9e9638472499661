"""Runs scripts for Accelerate with local data in place of the hub's, and notes what they train and measure.

Reads a job from each line of standard input, as JSON, and writes a line with the exit codes of its ranks. Each rank is
a fork of this process, which has imported what is slow. A job has

    path        folders that come first among those of Python, for the version of Accelerate
    package     accelerate or mt_accelerate: what the script imports, the one change to it
    library     whether the script imports Accelerate through a library, for which accelerate is then the package
    script, arguments, folder, variables, world
    replaced    words of the script -> others
    text        mrpc: pairs of sentences with a label. evaluated: more of them to evaluate. lines: rows of text

What stands for the hub: `datasets.load_dataset` gives a small data set of that kind, `evaluate.load` an accuracy.
Names of models are folders in the job's folder, where transformers looks first.

A rank writes FOLDER/found.RANK.json: {"losses": [...], "metrics": [...]}, the losses that are given to `backward` as
means over ranks, and what each `compute` of the metric gives.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import sys
import traceback
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

TEXTS = ("the cat sat", "a dog ran home", "one more line of text", "so it goes on and on", "no", "yes it is")


def pairs(count: int) -> dict[str, list[Any]]:
    """Pairs of sentences with a label that follows from the first."""
    first = [TEXTS[number % len(TEXTS)] for number in range(count)]
    second = [TEXTS[(3 * number + 1) % len(TEXTS)] for number in range(count)]
    labels = [len(text) % 2 for text in first]
    return {"sentence1": first, "sentence2": second, "label": labels, "idx": list(range(count))}


def lines(count: int) -> dict[str, list[Any]]:
    """Eight times as many rows: a script takes the first 500."""
    return {"text": [f"{TEXTS[number % 6]} {TEXTS[(number + 2) % 5]}" for number in range(8 * count)]}


KINDS: dict[str, tuple[Any, ...]] = {"mrpc": (pairs,), "evaluated": (pairs, 128), "lines": (lines,)}


def loader_of(rows: Any, evaluated: int = 18) -> Any:
    """A function in place of `datasets.load_dataset`, which gives these rows. evaluated: rows of the validation."""
    from datasets import Dataset, DatasetDict, load_dataset

    def load(*names: str, split: str | Mapping[str, str] | None = None, **options: Any) -> Any:
        if "data_files" in options:
            return load_dataset(*names, split=split, **options)  # of local files
        parts = {"train": Dataset.from_dict(rows(64)), "validation": Dataset.from_dict(rows(evaluated))}
        if isinstance(split, Mapping):  # name -> "part[:rows]"
            return DatasetDict({name: first_rows(parts, part) for name, part in split.items()})
        return DatasetDict(parts) if split is None else parts[split]

    return load


def first_rows(parts: Mapping[str, Any], split: str) -> Any:
    """split: a part's name and its rows, "train[:32]"."""
    name, count = split.removesuffix("]").split("[:")
    return parts[name].select(range(min(int(count), len(parts[name]))))


class Accuracy:
    """In place of `evaluate.load("glue", "mrpc")`. found: gets what `compute` gives."""

    def __init__(self, found: list[float]) -> None:
        self.found = found
        self.pairs: list[tuple[int, int]] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self, **given: Any) -> dict[str, float]:
        if "predictions" in given:
            self.add_batch(**given)
        right = sum(one == other for one, other in self.pairs) / max(len(self.pairs), 1)
        self.pairs = []
        self.found.append(right)
        return {"accuracy": right, "f1": right}


class Renamed(MetaPathFinder, Loader):
    """The name accelerate for another package and its modules, in libraries that import it."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] == "accelerate" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self.package + spec.name.removeprefix("accelerate"))

    def exec_module(self, module: ModuleType) -> None:
        """Has run under its own name."""


def record(accelerator: type, losses: list[float]) -> None:
    backward = accelerator.backward

    def recording(self: Any, loss: Any, **options: Any) -> None:
        losses.append(self.reduce(loss.detach().clone(), "mean").item())
        backward(self, loss, **options)

    accelerator.backward = recording


def run_script(job: dict[str, Any]) -> dict[str, list[float]]:
    import datasets
    import evaluate
    import vision

    vision.install()
    if job["library"] and job["package"] != "accelerate":
        sys.meta_path.insert(0, Renamed(job["package"]))
    found: dict[str, list[float]] = {"losses": [], "metrics": []}
    datasets.load_dataset = loader_of(*KINDS[job["text"]])
    evaluate.load = lambda *names, **options: Accuracy(found["metrics"])
    text = Path(job["script"]).read_text(encoding="utf-8")
    # The one change: the package's name, where it is imported.
    text = re.sub(
        r"^(\s*(?:from|import)) accelerate\b(?!\.test_utils)", rf"\1 {job['package']}", text, flags=re.MULTILINE
    )
    for words, others in job["replaced"].items():
        text = text.replace(words, others)
    record(__import__(job["package"]).Accelerator, found["losses"])
    sys.argv = [job["script"], *job["arguments"]]
    module = ModuleType("__main__")
    module.__file__ = job["script"]
    sys.modules["__main__"] = module
    exec(compile(text, job["script"], "exec", dont_inherit=True), module.__dict__)
    return found


def run_rank(job: dict[str, Any], rank: int, port: int) -> int:
    """Exit code."""
    folder = Path(job["folder"])
    os.chdir(folder)
    output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(job["variables"])
    if job["world"] > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["world"], "LOCAL_WORLD_SIZE": job["world"]}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path[:0] = job["path"]
    # transformers has imported the version that the environment of the tests may have; the job's own comes first.
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        del sys.modules[name]
    try:
        found = run_script(job)
    except BaseException:
        traceback.print_exc()
        return 1
    (folder / f"found.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    import datasets  # noqa: F401
    import evaluate  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers.models.auto import modeling_auto  # noqa: F401
    from transformers.models.bert import modeling_bert  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job, port, children = json.loads(line), free_port(), []
        for rank in range(job["world"]):
            if (child := os.fork()) == 0:
                code = run_rank(job, rank, port)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), file=answers, flush=True)


main()

"""Megatron-LM's programs beside training, tasks/main.py and the checkpoint converter, as commands of mt.

Their options are in no table of the training arguments: what a command of mt has an option for is filled in, and what
it has none for is listed with the reason, so that nothing that was given is dropped without a word.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mt_core.errors import ConfigError, did_you_mean
from mt_import.launch_scripts.reading import Command, read_script
from mt_import.launch_scripts.variables import Unknowns

TASKS_SCRIPT = "tasks/main.py"
CONVERTERS = ("tools/checkpoint/convert.py", "tools/checkpoint/util.py")
CHECKPOINT_LOADERS = ("core", "mcore", "megatron", "legacy", "llama_mistral", "mixtral_hf", "llama2_hf")
CHECKPOINT_SAVERS: Mapping[str, str] = {
    "core": "megatron",
    "mcore": "megatron",
    "megatron": "megatron",
    "legacy": "megatron-legacy",
}
"""Megatron's saver -> ours. Megatron's default, megatron, is an older name of core."""
FINETUNING_KEYS: Mapping[str, str] = {
    "epochs": "train.train_epochs",
    "pretrained-checkpoint": "checkpoint.load",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "lr": "optimizer.lr",
    "min-lr": "optimizer.min_lr",
    "weight-decay": "optimizer.weight_decay",
    "clip-grad": "optimizer.clip_grad",
    "lr-decay-style": "lr_schedule.lr_decay_style",
    "lr-warmup-fraction": "lr_schedule.lr_warmup_fraction",
    "eval-interval": "train.eval_interval",
    "seed": "train.seed",
    "seq-length": "data.seq_length",
    "tokenizer-type": "tokenizer.tokenizer_type",
    "vocab-file": "tokenizer.vocab_file",
    "tensor-model-parallel-size": "parallel.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "parallel.pipeline_model_parallel_size",
    "hidden-dropout": "model.hidden_dropout",
    "attention-dropout": "model.attention_dropout",
}


@dataclass
class Options:
    """Options of a program by name without hyphens in front; `take` gives and remembers it."""

    values: dict[str, list[str]]
    taken: set[str] = field(default_factory=set)

    def take(self, *names: str) -> list[str] | None:
        """The values of the first of these names that was given; all of them count as answered."""
        self.taken.update(names)
        return next((self.values[name] for name in names if name in self.values), None)

    def one(self, *names: str) -> str | None:
        values = self.take(*names)
        return values[0] if values else None

    def required(self, what: str, *names: str) -> str:
        value = self.one(*names)
        if value is None:
            raise ConfigError(f"{what} needs --{names[0]}, which is not given")
        return value

    def rest(self) -> list[str]:
        return [f"--{name}" for name in self.values if name not in self.taken]


@dataclass(frozen=True)
class Answer:
    """command: words of mt. left_out: options that it has none for, most of them what the checkpoint or the preset
    says of the model."""

    command: list[str]
    left_out: list[str]

    def text(self) -> str:
        note = f"\n# no option of this command answers {', '.join(self.left_out)}" if self.left_out else ""
        return " ".join(map(_quoted, self.command)) + note


def _quoted(word: str) -> str:
    """A word for the shell, in which $NAME of a script stays a variable."""
    if "$" not in word:
        return shlex.quote(word)
    return '"' + "".join(f"\\{letter}" if letter in '"`\\' else letter for letter in word) + '"'


def answer_script(path: Path, define: Mapping[str, str], arguments: Sequence[str]) -> list[Answer]:
    """The answers to a script that starts these programs alone; none for one that starts a training."""
    read = read_script(path, define, arguments)
    programs = [_program(command) for command in read.commands]
    if not all(programs):
        return []
    return [
        answer_words(_arguments(command, read.unknowns), program or "")
        for command, program in zip(read.commands, programs, strict=True)
    ]


def answer_words(words: Sequence[str], program: str | None = None) -> Answer:
    """The command of mt for the arguments of one of these programs. Raises ConfigError."""
    options = Options(_by_name(words))
    if program in CONVERTERS or (program is None and "task" not in options.values):
        return Answer(_conversion(options), options.rest())
    task = options.required(TASKS_SCRIPT, "task")
    if task not in TASKS:
        raise ConfigError(f"--task {task}: it can be {', '.join(TASKS)}{did_you_mean(task, TASKS)}")
    return Answer(TASKS[task](options, task), options.rest())


def is_other_program(words: Sequence[str]) -> bool:
    """Whether arguments without a script are those of tasks/main.py or of the converter."""
    names = _by_name(words)
    return "task" in names or ("model-type" in names and bool({"loader", "saver", "load-dir"} & names.keys()))


def _program(command: Command) -> str | None:
    script = next((word for word in command.words if word.endswith(".py")), "")
    known = (TASKS_SCRIPT, *CONVERTERS)
    return next((name for name in known if script == name or script.endswith(f"/{name}")), None)


def _arguments(command: Command, unknowns: Unknowns) -> list[str]:
    place = next(number for number, word in enumerate(command.words) if word.endswith(".py"))
    return [unknowns.readable(word) for word in command.words[place + 1 :]]


def _by_name(words: Sequence[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = options[name.replace("_", "-")] = [value] if equals else []
        else:
            values.append(word)
    return options


def _conversion(options: Options) -> list[str]:
    """Our loader recognizes the format, so that Megatron's --loader needs no counterpart."""
    loader = options.one("loader") or "megatron"
    if loader not in CHECKPOINT_LOADERS:
        raise ConfigError(f"--loader {loader}: it can be {', '.join(CHECKPOINT_LOADERS)}")
    saver = options.one("saver") or "megatron"
    if saver not in CHECKPOINT_SAVERS:
        raise ConfigError(f"--saver {saver}: it can be {', '.join(CHECKPOINT_SAVERS)}")
    load, save = (options.required("the checkpoint converter", name) for name in ("load-dir", "save-dir"))
    command = ["mt", "convert", "--load-dir", load, "--save-dir", save, "--saver", CHECKPOINT_SAVERS[saver]]
    for name in (
        "target-tensor-parallel-size",
        "target-pipeline-parallel-size",
        "target-expert-parallel-size",
        "make-vocab-size-divisible-by",
        "true-vocab-size",
    ):
        command += _option(options, f"--{name}", name)
    command += _option(options, "--target-transformer-impl", "saver-transformer-impl")
    for dtype in ("bf16", "fp16"):
        command += ["--dtype", dtype] if options.take(dtype) is not None else []
    return command


def _option(options: Options, ours: str, *theirs: str) -> list[str]:
    value = options.one(*theirs)
    return [] if value is None else [ours, value]


def _finetuning(options: Options, task: str) -> list[str]:
    if options.one("epochs") == "0":  # evaluation alone, of what --load has
        return _classification(options, task)
    command = ["mt", "train", "--preset", f"{task.lower()}-bert-345m"]
    command += _option(options, "--run-dir", "save", "load")
    settings = [f"{key}={value}" for name, key in FINETUNING_KEYS.items() if (value := options.one(name)) is not None]
    settings += ["precision.dtype=" + dtype for dtype in ("bf16", "fp16") if options.take(dtype) is not None]
    if train := options.take("train-data"):
        settings.append(f"data.train_data_path={json.dumps(train)}")
    if valid := options.take("valid-data"):
        sets = ", ".join(f"{name}={json.dumps([path])}" for name, path in _named(valid).items())
        settings.append(f"data.valid_data_paths={{{sets}}}")
    return command + [word for setting in settings for word in ("--set", setting)]


def _classification(options: Options, task: str) -> list[str]:
    load = options.required(f"--task {task} --epochs 0", "load", "pretrained-checkpoint")
    command = ["mt", "eval", "classification", load, "--task", task.lower()]
    for name, path in _named(options.take("valid-data") or []).items():
        command += ["--data", f"{name}={path}"]
    return command


def _named(paths: Sequence[str]) -> dict[str, str]:
    """Names of development sets: those of the files, numbered where two are alike."""
    named: dict[str, str] = {}
    for path in paths:
        name = Path(path).stem.replace("-", "_").replace("$", "") or "valid"
        named[name if name not in named else f"{name}_{len(named)}"] = path
    return named


def _perplexity(options: Options, task: str) -> list[str]:
    load, data = (options.required(f"--task {task}", name) for name in ("load", "valid-data"))
    command = ["mt", "eval", task.lower(), load, data]
    if task == "LAMBADA":
        command.append("--strict" if options.take("strict-lambada") is not None else "--loose")
    else:
        command += _option(options, "--overlapping-eval", "overlapping-eval")
    command += _option(options, "--seq-length", "seq-length")
    requests = options.one("micro-batch-size")
    return command + ([] if requests is None else ["--set", f"inference.max_requests={requests}"])


def _retriever(options: Options, task: str) -> list[str]:
    """mt's index is a file of embeddings, and questions are those of one set at a time."""
    index = options.required(f"--task {task}", "embedding-path")
    questions = options.required(f"--task {task}", "qa-data-test", "qa-data-dev")
    command = ["mt", "retrieve", "evaluate", index, questions]
    command += _option(options, "--checkpoint", "load", "ict-load")
    command += _option(options, "--evidence", "evidence-data-path")
    command += _option(options, "--match", "faiss-match")
    for top in options.take("retriever-report-topk-accuracies", "faiss-topk-retrievals") or []:
        command += ["--top-k", top]
    return command


TASKS: Mapping[str, Callable[[Options, str], list[str]]] = {
    "RACE": _finetuning,
    "MNLI": _finetuning,
    "QQP": _finetuning,
    "WIKITEXT103": _perplexity,
    "LAMBADA": _perplexity,
    "RETRIEVER-EVAL": _retriever,
}

"""The questions of `mt config init`: each asked only where it matters, its answer checked as it is given."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mt_cli.text_files import no_utf8, size_of_files, text_files, text_keys
from mt_core.config.checks import as_world, divisors, listed
from mt_core.config.files import shown, to_toml
from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.config.sources import find_preset, installed_presets
from mt_core.config_map import model_section, read_hf_config
from mt_core.errors import ConfigError, MtError
from mt_core.plugins import PluginHost
from mt_core.specs import DATASETS

TENSOR, PIPELINE, EXPERT = (f"parallel.{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert"))
Settings = dict[str, Any]
"""Dotted key -> value."""
CARRIED = ("builtin", "mock", "instructions")
"""Data sets without files."""
STEPS = 1000
LONGEST = 4096
"""Sequence that is proposed for a Hugging Face model which can take longer ones."""
UNANSWERED: Settings = {"train.train_iters": STEPS, "train.global_batch_size": None}
"""What a draft is checked with until there are answers: a preset's batch need not suit the processes."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_JSON = "tokenizer.json"
SPLITS = ("90,10,0", "80,20,0", "50,50,0")
"""Tried in turn for a text that is too small for the usual one."""
QUICK_BYTES = 50_000_000
"""Bytes of text: more of it is not tokenized to check an answer."""
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


@dataclass
class Draft:
    """A configuration while it is made. processes: of this machine."""

    host: PluginHost
    has_gpu: bool
    preset: str | None = None
    folder: Path | None = None
    """The Hugging Face folder that the model comes from."""
    processes: int = 1
    settings: Settings = field(default_factory=dict)

    def config(self, settings: Settings | None = None, processes: int | None = None) -> Config:
        """The checked configuration with some settings, or the processes, changed. Raises MtError if it cannot be."""
        # Later ones win: what was answered replaces what a draft is checked with meanwhile.
        values = {**UNANSWERED, **self.settings, **(settings or {})}
        # As --set writes them: every answer passes the same parser and checks as a configuration of mt train.
        overrides = [f"{key}={shown(value)}" for key, value in values.items()]
        with as_world(processes or self.processes):
            return load_config(preset=self.preset, overrides=overrides, host=self.host).config

    def is_legal(self, settings: Settings) -> bool:
        try:
            self.config(settings=settings)
        except MtError:
            return False
        return True

    def accept(self, settings: Settings) -> None:
        """Take settings over if the configuration stays a legal one. Raises MtError."""
        self.config(settings=settings)
        self.settings.update(settings)

    def toml(self) -> str:
        """What was answered, as a file for mt train."""
        sections: dict[str, list[str]] = {}
        for key, value in self.settings.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, []).append(f"{name} = {to_toml(value)}")
        blocks = [f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items()]
        return "\n\n".join([*([f"preset = {to_toml(self.preset)}"] if self.preset else []), *blocks]) + "\n"


@dataclass(frozen=True)
class Question:
    """name: of the option that answers it, too. text: what is asked, with what is allowed. default: its answer when
    there is none. apply: takes an answer over; raises MtError with what is wrong. asked: whether it matters."""

    name: str
    text: Callable[[Draft], str]
    default: Callable[[Draft], str]
    apply: Callable[[Draft, str], None]
    asked: Callable[[Draft], bool] = lambda draft: True


# -- the model --------------------------------------------------------------------------------------


def _model_text(draft: Draft) -> str:
    presets = ", ".join(sorted(installed_presets(draft.host)[0]))
    return f"Presets: {presets}.\nModel: a preset, or a Hugging Face folder"


def _take_model(draft: Draft, answer: str) -> None:
    """A preset; or a folder, for its weights, or for its config.json where it has none."""
    path = Path(answer)
    if not path.is_dir() and not path.is_file():
        find_preset(answer, draft.host)
        draft.preset = answer
        return
    folder = path if path.is_dir() else path.parent
    external = read_hf_config(path)
    section = model_section(external, draft.host)
    if any((folder / name).is_file() for name in WEIGHTS):
        # With weights the model section comes from the checkpoint; without, its keys are written out.
        draft.settings["checkpoint.load"] = str(folder)
    else:
        draft.settings.update({f"model.{key}": value for key, value in section.items() if value is not None})
    draft.settings["data.seq_length"] = min(section.get("max_position_embeddings") or LONGEST, LONGEST)
    draft.folder = folder


# -- data and tokenizer -----------------------------------------------------------------------------


def _take_data(draft: Draft, answer: str) -> None:
    if answer in draft.host[DATASETS].names():
        _accept_data(draft, {"data.dataset_type": answer})
        return
    entries = _entries(answer.split())
    paths = [entry if isinstance(entry, str) else entry["prefix"] for entry in entries]
    missing = [path for path in paths if not _is_data(path)]
    if missing:
        raise ConfigError(
            f"{missing[0]}: no such text file, and no {missing[0]}.bin with {missing[0]}.idx (mt data preprocess makes "
            "them); give paths, builtin or mock"
        )
    draft.accept({"data.dataset_type": _type_of_files(draft), "data.data_path": entries})


def _accept_data(draft: Draft, settings: Settings) -> None:
    """Raises ConfigError for data that do not suit the model, where torch can build it."""
    config = draft.config(settings)
    if find_spec("torch") is not None:
        from mt_cli.presets import unsuitable_data_of

        problem = unsuitable_data_of(config, draft.host)
        if problem is not None:
            raise ConfigError(problem)
    draft.settings.update(settings)


def _entries(parts: Sequence[str]) -> Sequence[str | Settings]:
    """Entries of data.data_path: paths, or weights and paths in turn."""
    # Megatron-LM: get_blend_from_list, which takes every other text for a weight if all of these are numbers.
    weights, paths = parts[::2], parts[1::2]
    if len(weights) > len(paths) or not all(map(_is_number, weights)):
        return parts if len(parts) == 1 or not all(map(_is_data, parts)) else _weighted_by_size(parts)
    return [{"prefix": path, "weight": float(weight)} for weight, path in zip(weights, paths, strict=True)]


def _weighted_by_size(parts: Sequence[str]) -> list[Settings]:
    """All of the text in its proportions. With weights, since a blend without them does not repeat: it ends after
    each sample was taken once, and a run with more steps is refused."""
    sizes = [max(1, size_of_files(part)) for part in parts]
    return [
        {"prefix": part, "weight": max(0.001, round(size / sum(sizes), 3))}
        for part, size in zip(parts, sizes, strict=True)
    ]


def _is_number(part: str) -> bool:
    return part.replace(".", "", 1).isdigit()


def _is_data(part: str) -> bool:
    prefix = part.removesuffix(".bin").removesuffix(".idx")
    # A file, a folder or a pattern of text.
    if Path(part).exists() or glob.glob(part, recursive=True):
        return True
    return Path(f"{prefix}.bin").is_file() and Path(f"{prefix}.idx").is_file()


def _type_of_files(draft: Draft) -> str:
    named = str(_preset_values(draft, "data").get("dataset_type", "gpt"))
    return "gpt" if named in CARRIED else named


def _preset_values(draft: Draft, section: str) -> Mapping[str, Any]:
    return find_preset(draft.preset, draft.host).get(section, {}) if draft.preset is not None else {}


def _has_files(draft: Draft) -> bool:
    return "data.data_path" in draft.settings


def _needs_tokenizer(draft: Draft) -> bool:
    """Not where one comes with the weights, nor for the numbers of the mock data."""
    loaded = "checkpoint.load" in draft.settings and _tokenizer_in(draft.folder) is not None
    return not loaded and draft.settings["data.dataset_type"] != "mock"


def _default_tokenizer(draft: Draft) -> str:
    return str(draft.folder) if _tokenizer_in(draft.folder) is not None else "bytes"


def _tokenizer_in(folder: Path | None) -> Settings | None:
    """The section for the tokenizer files of a folder; None: there are none."""
    if folder is None:
        return None
    if (folder / TOKENIZER_JSON).is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    for vocabulary, merges in GPT2_FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            files = {"vocab_file": str(folder / vocabulary), "merge_file": str(folder / merges)}
            return {"tokenizer_type": "GPT2BPETokenizer", **files}
    if (folder / "vocab.txt").is_file():
        return {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(folder / "vocab.txt")}
    return _sentence_piece(next(iter(sorted(folder.glob("*.model"))), None))


def _sentence_piece(path: Path | None) -> Settings | None:
    return None if path is None else {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(path)}


def _take_tokenizer(draft: Draft, answer: str) -> None:
    path = Path(answer)
    if answer == "bytes":
        section: Settings | None = {"tokenizer_type": "ByteLevelTokenizer"}
    else:
        section = _tokenizer_in(path) if path.is_dir() else _sentence_piece(path if path.suffix == ".model" else None)
    if section is None or not (answer == "bytes" or path.exists()):
        raise ConfigError(
            f"{answer}: no tokenizer is there; give a folder with tokenizer.json, vocab.json and merges.txt or "
            "vocab.txt, or a SentencePiece .model, or bytes"
        )
    draft.accept({f"tokenizer.{key}": value for key, value in section.items()})


def _paths(draft: Draft) -> list[str]:
    entries = draft.settings.get("data.data_path", [])
    return [entry if isinstance(entry, str) else entry["prefix"] for entry in entries]


def _encodings_text(draft: Draft) -> str:
    return f"{no_utf8(text_files(_paths(draft)))} is no UTF-8. Encodings, tried in turn, such as utf-8 cp1252"


def _needs_encoding(draft: Draft) -> bool:
    return no_utf8(text_files(_paths(draft))) is not None


def _take_encodings(draft: Draft, answer: str) -> None:
    draft.accept({"data.encodings": answer.split()})


def _json_keys(draft: Draft) -> list[str]:
    return text_keys(text_files(_paths(draft)))


def _needs_json_key(draft: Draft) -> bool:
    return bool(keys := _json_keys(draft)) and "text" not in keys


def _take_dataset(draft: Draft, answer: str) -> None:
    draft.host[DATASETS].get(answer, key="data.dataset_type")
    _accept_data(draft, {"data.dataset_type": answer})


# -- lengths, processes, batch ----------------------------------------------------------------------


def _number(answer: str) -> int:
    if not answer.isdigit() or int(answer) == 0:
        raise ConfigError(f"{answer}: expected a whole number above 0")
    return int(answer)


def _default_length(draft: Draft) -> str:
    return str(draft.config().data.seq_length)


def _take_length(draft: Draft, answer: str) -> None:
    """With the data made as mt train makes them, unless there are so many that this would take long. A text of which
    the usual split leaves too little for validation gets a larger share of it."""
    settings: Settings = {"data.seq_length": _number(answer)}
    draft.config(settings)
    if find_spec("torch") is not None and _bytes_of_files(draft) <= QUICK_BYTES:
        settings = _with_possible_split(draft, settings)
    draft.accept(settings)


def _with_possible_split(draft: Draft, settings: Settings) -> Settings:
    from mt_cli.presets import unusable_files_of

    problem = unusable_files_of(draft.config(settings), draft.host)
    if problem is None:
        return settings
    for split in SPLITS:
        with suppress(MtError):
            divided = {**settings, "data.split": split}
            if unusable_files_of(draft.config(divided), draft.host) is None:
                return divided
    raise ConfigError(problem)


def _bytes_of_files(draft: Draft) -> int:
    return sum(map(size_of_files, _paths(draft)))


def _take_processes(draft: Draft, answer: str) -> None:
    processes = _number(answer)
    draft.config(processes=processes)
    draft.processes = processes


def default_processes(has_gpu: bool) -> int:
    """GPUs of this machine, or one process on its CPU."""
    if not has_gpu:
        return 1
    import torch

    return torch.cuda.device_count()


def legal_sizes(draft: Draft, key: str) -> list[int]:
    """Sizes of an axis that go with all answers so far."""
    # By trial: whether a size is legal depends on heads, layers and experts, which the checks of the configuration
    # compare.
    return [size for size in divisors(draft.processes) if draft.is_legal(_of_axis(key, size))]


def _of_axis(key: str, size: int) -> Settings:
    """Sequences are divided, too, where there are tensor-parallel ranks."""
    return {key: size, **({"parallel.sequence_parallel": True} if key == TENSOR and size > 1 else {})}


def _take_axis(key: str) -> Callable[[Draft, str], None]:
    def take(draft: Draft, answer: str) -> None:
        draft.accept(_of_axis(key, _number(answer)))

    return take


def _has_choice(key: str) -> Callable[[Draft], bool]:
    def asked(draft: Draft) -> bool:
        experts = key != EXPERT or getattr(draft.config().model, "moe", None) is not None
        return experts and len(legal_sizes(draft, key)) > 1

    return asked


def _axis(name: str, what: str, key: str) -> Question:
    def text(draft: Draft) -> str:
        return f"{what} ({listed(legal_sizes(draft, key))})"

    return Question(name, text, lambda draft: "1", _take_axis(key), _has_choice(key))


def data_parallel(draft: Draft) -> int:
    # Expert parallelism divides the data-parallel ranks further and is no factor here.
    return draft.processes // (draft.settings.get(TENSOR, 1) * draft.settings.get(PIPELINE, 1))


def _take(key: str) -> Callable[[Draft, str], None]:
    return lambda draft, answer: draft.accept({key: _number(answer)})


def _default_micro_batch(draft: Draft) -> str:
    return str(draft.config().train.micro_batch_size)


def _default_batch(draft: Draft) -> str:
    """The preset's, rounded up to a multiple of what the processes take at once."""
    unit = _batch_unit(draft)
    wanted = _preset_values(draft, "train").get("global_batch_size", unit)
    return str(-(-int(wanted) // unit) * unit)


def _batch_unit(draft: Draft) -> int:
    return int(draft.settings["train.micro_batch_size"]) * data_parallel(draft)


def _default_steps(draft: Draft) -> str:
    return str(_preset_values(draft, "train").get("train_iters", STEPS))


def _counts_steps(draft: Draft) -> bool:
    """Not of a preset that trains for epochs."""
    return "train_epochs" not in _preset_values(draft, "train")


def _says(text: str) -> Callable[[Draft], str]:
    return lambda draft: text


QUESTIONS: tuple[Question, ...] = (
    Question("model", _model_text, _says("gpt-tiny"), _take_model),
    Question(
        "data",
        _says("Data: text files or folders, .bin/.idx without its ending, builtin or mock"),
        _says("builtin"),
        _take_data,
    ),
    Question(
        "tokenizer",
        _says("Tokenizer: its folder or file, or bytes"),
        _default_tokenizer,
        _take_tokenizer,
        _needs_tokenizer,
    ),
    Question("dataset-type", _says("Samples"), _type_of_files, _take_dataset, _has_files),
    Question("encodings", _encodings_text, _says("utf-8 cp1252"), _take_encodings, _needs_encoding),
    Question(
        "json-key",
        lambda draft: f"Key of the text ({', '.join(_json_keys(draft))})",
        lambda draft: _json_keys(draft)[0],
        lambda draft, answer: draft.accept({"data.json_key": answer}),
        _needs_json_key,
    ),
    Question("seq-length", _says("Sequence length"), _default_length, _take_length),
    Question(
        "processes",
        _says("Processes, one for each GPU of this machine"),
        lambda draft: str(default_processes(draft.has_gpu)),
        _take_processes,
    ),
    _axis("tensor-parallel", "Tensor parallel", TENSOR),
    _axis("pipeline-parallel", "Pipeline parallel", PIPELINE),
    _axis("expert-parallel", "Expert parallel", EXPERT),
    Question(
        "micro-batch-size", _says("Samples of a micro-batch"), _default_micro_batch, _take("train.micro_batch_size")
    ),
    Question(
        "global-batch-size",
        lambda draft: f"Samples of a step, a multiple of {_batch_unit(draft)}",
        _default_batch,
        _take("train.global_batch_size"),
    ),
    Question("steps", _says("Steps"), _default_steps, _take("train.train_iters"), _counts_steps),
)


def make_draft(
    host: PluginHost,
    has_gpu: bool,
    answers: Mapping[str, str],
    ask: Callable[[str, str], str] | None,
    tell: Callable[[str], None],
) -> Draft:
    """answers: by name of question, which are not asked. ask: (text, default) -> answer; None takes the defaults.
    tell: shows what is wrong with an answer before the question is asked again.

    Raises MtError for a given answer, or a default, that cannot be.
    """
    draft = Draft(host, has_gpu)
    for question in QUESTIONS:
        # Applied even where it would not be asked, so that an option that cannot be is an error.
        if question.name in answers:
            question.apply(draft, answers[question.name])
        elif question.asked(draft):
            _put(question, draft, ask, tell)
    return _with_usual_settings(draft)


def _put(question: Question, draft: Draft, ask: Callable[[str, str], str] | None, tell: Callable[[str], None]) -> None:
    if ask is None:
        return question.apply(draft, question.default(draft))
    while True:
        try:
            return question.apply(draft, ask(question.text(draft), question.default(draft)))
        except MtError as error:
            tell(str(error))


def _with_usual_settings(draft: Draft) -> Draft:
    """What needs no question: bf16 on a GPU, a divided optimizer state over data-parallel ranks."""
    if draft.has_gpu:
        draft.accept({"precision.dtype": "bf16"})
    if data_parallel(draft) > 1:
        draft.accept({"parallel.use_distributed_optimizer": True})
    return draft

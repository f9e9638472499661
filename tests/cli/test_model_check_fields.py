"""What `mt models check` says of a value that cannot be: the field of config.json, its value, what it can be.

Configurations are those of transformers' own classes. Without these names a user of a published file is sent to a key
that the file does not have.
"""

from __future__ import annotations

import json
import resource
import signal
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.family_cases import CASES

from mt_ckpt.hugging_face.family import identify
from mt_cli.model_check import Problem, check_model
from mt_core.config_types import FIELD_TYPES
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost, load_plugins

transformers = pytest.importorskip("transformers")

Path_ = tuple[str, ...]
LARGE = 10**12
SECONDS, BYTES = 5, 1 << 30


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


def contents(name: str) -> dict[str, Any]:
    """config.json of a small model, with every field of its class."""
    case = CASES[name]
    parts = {part: getattr(transformers, kind)(**keys) for part, (kind, keys) in case.parts.items()}
    config = getattr(transformers, case.config)(**case.keys, **parts)
    return json.loads(config.to_json_string(use_diff=False))


def with_value(external: Mapping[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    inner = value if len(path) == 1 else with_value(external[path[0]], path[1:], value)
    return {**external, path[0]: inner}


def problems_of(external: Mapping[str, Any], folder: Path, host: PluginHost) -> list[Problem]:
    file = folder / "config.json"
    file.write_text(json.dumps(external))
    return check_model(file, host).problems


@pytest.mark.parametrize(
    ("name", "path", "value", "sentence"),
    [
        # A type by its name
        ("llama", "num_hidden_layers", "x", "num_hidden_layers='x' is not supported; it can be an integer"),
        ("llama", "rms_norm_eps", None, "rms_norm_eps=null is not supported; it can be a number"),
        ("llama", "tie_word_embeddings", 1, "tie_word_embeddings=1 is not supported; it can be true or false"),
        ("llama", "hidden_size", 32.0, "hidden_size=32.0 is not supported; it can be an integer"),
        ("llama", "num_attention_heads", True, "num_attention_heads=True is not supported; it can be an integer"),
        (
            "qwen3_5",
            "text_config.num_hidden_layers",
            [],
            "text_config.num_hidden_layers=[] is not supported; it can be",
        ),
        ("qwen3_vl", "vision_config.depth", {}, "vision_config.depth={} is not supported; it can be an integer"),
        (
            "gemma4 with pictures",
            "text_config.rope_parameters.full_attention",
            "x",
            "text_config.rope_parameters.full_attention='x' is not supported; it can be a JSON object",
        ),
        # Rules of [model], whose keys have other names
        ("llama", "attention_dropout", 1.5, "attention_dropout=1.5 is not supported: input should be less than or"),
        (
            "deepseek_v32",
            "moe_intermediate_size",
            [12, 12],
            "moe_intermediate_size=[12, 12] is not supported: expected an integer",
        ),
        ("internvl", "downsample_ratio", 1.5, "downsample_ratio=1.5 is not supported, since 0 comes of it: input"),
        (
            "qwen3_vl_moe",
            "text_config.num_experts_per_tok",
            9,
            "text_config.num_experts_per_tok=9 is above text_config.num_local_experts=4; a token can have 1 to 4",
        ),
        ("mimo_v2_flash", "rms_norm_eps", -1.0, "rms_norm_eps=-1.0 cannot be used: "),
        # Maps of a part, which know nothing of the file around it
        (
            "llava",
            "vision_config.hidden_act",
            "x",
            "vision_config.hidden_act='x' is not supported; it can be quick_gelu",
        ),
        # A null that transformers does not compute with
        ("gpt_oss", "rope_parameters.truncate", None, "rope_parameters.truncate=null is not supported; it can be true"),
    ],
)
def test_the_field_is_named_with_its_value_and_what_it_can_be(
    name: str, path: str, value: Any, sentence: str, tmp_path: Path, host: PluginHost
) -> None:
    """`mt convert` says the same."""
    external = with_value(contents(name), tuple(path.split(".")), value)
    problem = problems_of(external, tmp_path, host)[0]
    assert problem.why.startswith(sentence)
    assert path in problem.names
    assert "model." not in problem.why
    with pytest.raises(ConfigError) as refusal:
        identify(external, [], host)
    assert path in str(refusal.value)


def test_a_size_that_is_missing_is_named_as_config_json_has_it(tmp_path: Path, host: PluginHost) -> None:
    external = contents("llama") | {"architectures": ["LlamaForCausalLM"]}
    del external["hidden_size"]
    assert problems_of(external, tmp_path, host)[0].why.startswith("hidden_size is missing")


def test_fields_of_a_part_are_refused_one_by_one(tmp_path: Path, host: PluginHost) -> None:
    external = contents("qwen3_5")
    external["text_config"] |= {"hidden_act": "relu", "unheard_of": 1}
    names = [problem.names for problem in problems_of(external, tmp_path, host)]
    assert names == [["text_config.unheard_of"], ["text_config.hidden_act"]]


def paths_of(external: Mapping[str, Any], within: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    for name, value in external.items():
        if isinstance(value, Mapping) and value:
            yield from paths_of(value, (*within, name))
        yield (*within, name), value


def every_field() -> Iterator[tuple[str, dict[str, Any], Path_, Any]]:
    """Each field of each class once."""
    seen = set()
    for name, case in CASES.items():
        external = contents(name)
        for path, value in paths_of(external):
            if (case.config, path) not in seen:
                seen.add((case.config, path))
                yield name, external, path, value


def test_every_field_of_a_known_type_is_named_in_every_family(tmp_path: Path, host: PluginHost) -> None:
    """A set is no value of any field's type; only what nothing reads may have it."""
    wrong = []
    for name, external, path, _ in every_field():
        if path[-1] not in FIELD_TYPES or FIELD_TYPES[path[-1]].takes({"unheard_of": 1}):
            continue
        problems = problems_of(with_value(external, path, {"unheard_of": 1}), tmp_path, host)
        dotted = ".".join(path)
        if not problems or dotted not in problems[0].names or f"{dotted}={{'unheard_of': 1}}" not in problems[0].why:
            wrong.append((name, dotted))
    assert wrong == [], wrong


class OutOfTimeError(BaseException):
    """No error that a program may catch."""


@contextmanager
def limited(seconds: float, what: str, slow: list[str]) -> Iterator[None]:
    """Ends what takes more CPU time than this, and puts its name on the list."""

    def end(*_: object) -> None:
        raise OutOfTimeError

    former = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except OutOfTimeError:
        slow.append(what)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)


def test_a_huge_number_in_any_field_is_answered_at_once_and_in_little_memory(tmp_path: Path, host: PluginHost) -> None:
    """Layers and heads are counted one by one: without a limit a check of 10^12 of them does not end."""
    slow: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, external, path, value in every_field():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        with limited(SECONDS, f"{name}: {'.'.join(path)}", slow):
            problems_of(with_value(external, path, LARGE), tmp_path, host)
    assert slow == []
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES


SAMPLES = (3, 0.5, True, "x", None, [3], [0.5], ["x"], {"a": 1})
BEYOND = {
    # What published files have that classes of today refuse
    ("kv_lora_rank", "None"), ("qk_nope_head_dim", "None"), ("qk_rope_head_dim", "None"), ("qk_head_dim", "None"),
    ("rope_theta", "None"), ("rope_theta", "[3]"), ("rope_theta", "[0.5]"), ("moe_intermediate_size", "[3]"),
    ("id2label", "{'a': 1}"), ("problem_type", "'x'"), ("classifier_pooling", "'x'"),
    # A type that no tower can be built with
    ("image_size", "None"), ("patch_size", "None"),
}  # fmt: skip


def takes(annotation: Any, value: Any) -> bool:
    from huggingface_hub.dataclasses import type_validator

    try:
        type_validator("field", value, annotation)
    except TypeError:
        return False
    return True


def test_types_are_those_of_the_classes_of_transformers() -> None:
    """What a class takes is taken, and what each class that has the field refuses is refused: a value that no program
    reads, or one that another program reads, would else be read as something."""
    declared: dict[str, list[Any]] = {}
    for case in CASES.values():
        for part, _ in (*case.parts.values(), (case.config, None)):
            hints = typing.get_type_hints(getattr(transformers, part), localns={"torch": torch}, include_extras=True)
            for name in hints.keys() & FIELD_TYPES.keys():
                declared.setdefault(name, []).append(hints[name])
    wrong = []
    for name, types in declared.items():
        for value in SAMPLES:
            able = any(takes(annotation, value) for annotation in types)
            # A whole number is a number, though some classes want the point.
            pointed = {3: 0.5, "[3]": [0.5]}.get(value if type(value) is int else repr(value))
            able |= pointed is not None and any(takes(annotation, pointed) for annotation in types)
            if FIELD_TYPES[name].takes(value) != able and (name, repr(value)) not in BEYOND:
                wrong.append((name, value, able))
    assert len(declared) > 250
    assert wrong == [], wrong

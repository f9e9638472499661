"""Sampling from the command line and with text: options, several sequences, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mt_cli.main import run
from mt_core.errors import ConfigError
from mt_infer.batch_files import generate_file
from mt_infer.commands.sampling import SamplingOptions
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

TINY = {
    "model.num_layers": 1,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "data.seq_length": 128,
    "data.corpus_bytes": 1000000,
    "train.micro_batch_size": 2,
    "train.train_iters": 2,
    "train.eval_interval": 2,
    "train.eval_iters": 1,
    "train.sample_tokens": 1,
    "train.num_threads": 1,
    "lr_schedule.lr_warmup_iters": 1,
}


def train(folder: Path, **settings: Any) -> Path:
    """A run in this folder. settings: of the tokenizer."""
    keys = {**TINY, **{f"tokenizer.{key}": value for key, value in settings.items()}}
    options = [option for key, value in keys.items() for option in ("--set", f"{key}={value}")]
    assert run(["train", "--run-dir", str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With bytes as tokens."""
    return train(tmp_path_factory.mktemp("model") / "run")


@pytest.fixture(scope="module")
def generator(model: Path) -> TextGenerator:
    return TextGenerator.load(model, device="cpu", settings={"inference": {"cache_memory_gb": 0.05}})


def output(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    capsys.readouterr()
    assert run(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def records(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output(capsys, *arguments, "--json").splitlines()]


def test_several_sequences_with_log_probabilities(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    options = ("--n", 2, "--seed", 3, "--max-tokens", 5, "--logprobs", 2, "--prompt-logprobs", 0, "--ignore-eod")
    found = records(capsys, model, "--prompt", "ab", "--prompt", "c", *options)
    assert [(one["prompt"], one["index"]) for one in found] == [("ab", 0), ("ab", 1), ("c", 0), ("c", 1)]
    assert all(len(one["tokens"]) == len(one["logprobs"]) == 5 for one in found)
    assert all(len(one["logprobs"][0]["top"]) == 2 for one in found)
    assert found[0]["prompt_logprobs"][0] is None
    assert found[0]["prompt_logprobs"][1]["token"] < 0


def test_constrained_text(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "grammar.lark").write_text('start: "x" /[0-9]/ "y"')
    common = (model, "--prompt", "Say: ", "--max-tokens", 100, "--seed", 1)
    for form in (tmp_path / "schema.json", json.dumps(schema)):
        assert set(json.loads(records(capsys, *common, "--json-schema", form)[0]["text"])) == {"a"}
    assert records(capsys, *common, "--grammar", tmp_path / "grammar.lark")[0]["text"][::2] == "xy"
    assert output(capsys, *common, "--choice", "left").strip() == "Say: left"
    assert records(capsys, *common, "--regex", "z{3}")[0]["text"] == "zzz"


# Of each option another value than its default, with what it needs.
OPTIONS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 3},
    "min_tokens": {"min_tokens": 2},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.5},
    "top_p_decay": {"top_p_decay": 0.5, "top_p": 0.9},
    "top_p_bound": {"top_p_bound": 0.1, "top_p_decay": 0.5, "top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "logit_bias": {"logit_bias": ["17=-2.5"]},
    "bad_words": {"bad_words": ["a"]},
    "forced_text": {"forced_text": "a"},
    "seed": {"seed": 1},
    "stop": {"stop": ["a"]},
    "stop_token": {"stop_token": ["17"]},
    "ignore_eod": {"ignore_eod": True},
    "n": {"n": 2},
    "best_of": {"best_of": 2},
    "logprobs": {"logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "num_beams": {"num_beams": 2, "temperature": 1.0},
    "length_penalty": {"length_penalty": 0.5},
    "early_stopping": {"early_stopping": "never"},
    "json_schema": {"json_schema": "{}"},
    "regex": {"regex": "a+"},
    "grammar": {"grammar": "grammar.lark"},
    "choice": {"choice": ["a"]},
}


@pytest.mark.parametrize("name", [option.name for option in fields(SamplingOptions)])
def test_each_option_changes_the_parameters(generator: TextGenerator, tmp_path: Path, name: str) -> None:
    """An option whose name is no sampling parameter's would otherwise be left out in silence."""
    values = dict(OPTIONS[name])
    if name == "grammar":
        values["grammar"] = tmp_path / values["grammar"]
        values["grammar"].write_text('start: "a"', encoding="utf-8")
    with_it, without = (
        SamplingOptions(**options) for options in (values, {key: values[key] for key in values if key != name})
    )
    tokenizer = generator.tokenizer
    assert with_it.with_tokens(with_it.parameters(), tokenizer) != without.with_tokens(without.parameters(), tokenizer)


def test_tokens_by_their_text(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    common = (model, "--prompt", "a", "--max-tokens", 6, "--temperature", 0, "--ignore-eod")
    forced = ("--forced-text", "hello", "--logit-bias", "q=1000")
    assert records(capsys, *common, *forced)[0]["text"] == "helloq"
    assert records(capsys, *common, *forced, "--stop-token", "q")[0]["text"] == "hello"
    assert records(capsys, *common, *forced, "--stop-token", ord("q"))[0]["finish"] == "stop"
    assert records(capsys, *common, *forced, "--bad-words", "oq")[0]["text"][:5] == "hello"
    assert not records(capsys, *common, *forced, "--bad-words", "oq")[0]["text"].endswith("oq")


def test_beams_and_speculation(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    beams = records(capsys, model, "--prompt", "if ", "--num-beams", 3, "--n", 3, "--max-tokens", 6)
    assert [one["score"] for one in beams] == sorted((one["score"] for one in beams), reverse=True)
    assert len({one["text"] for one in beams}) == 3
    stop = beams[0]["text"][2]
    stopped = records(capsys, model, "--prompt", "if ", "--num-beams", 3, "--max-tokens", 6, "--stop", stop)
    assert stop not in stopped[0]["text"]
    shown = output(capsys, model, "--prompt", "if ", "--num-beams", 3, "--n", 3, "--max-tokens", 6)
    assert shown == "\n\n".join("if " + one["text"] for one in beams) + "\n"
    common = (model, "--prompt", "if if", "--max-tokens", 30, "--seed", 5)
    drafting = ("--set", "inference.speculative_method=draft_model", "--set", f"inference.speculative_model={model}")
    assert output(capsys, *common, *drafting) == output(capsys, *common)


def test_best_of_several_is_chosen_by_mean_log_probability(generator: TextGenerator) -> None:
    several = SamplingParameters(n=4, seed=9, max_tokens=6, logprobs=0, ignore_eod=True)
    every = generator.generate(["x = "], several)[0]
    means = {done.text: sum(one.token for one in done.logprobs) / len(done.logprobs) for done in every}
    best = generator.generate(["x = "], SamplingParameters(n=2, best_of=4, seed=9, max_tokens=6, ignore_eod=True))[0]
    expected = sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert [done.text for done in best] == expected
    assert [done.score for done in best] == pytest.approx([means[text] for text in expected])
    assert best[0].logprobs == []


def test_drafts_need_the_same_vocabulary(model: Path, tmp_path: Path) -> None:
    other = train(tmp_path / "other", vocab_extra_ids=3)
    settings = {"inference": {"speculative_method": "draft_model", "speculative_model": str(other)}}
    with pytest.raises(ConfigError, match=r"another vocabulary \(264 ids\) than the model \(261 ids\)"):
        TextGenerator.load(model, device="cpu", settings=settings)


BAD_PARAMETERS = [
    ({"temperature": -0.1}, "temperature is -0.1; it must be 0"),
    ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ({"max_tokens": 3.5}, "max_tokens is 3.5; it must be an integer"),
    ({"n": None}, "n is None; it must be an integer"),
    ({"ignore_eod": 1}, "ignore_eod is 1; it must be true or false"),
    ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_p_decay": 0.5}, "top_p_decay is 0.5; it must be 0 where top_p is 1"),
    ({"top_p": 0.5, "top_p_bound": 0.2}, "top_p_bound is 0.2; it must be 0 without top_p_decay"),
    ({"top_p": 0.5, "top_p_decay": 0.9, "top_p_bound": 0.6}, "top_p_bound is 0.6; it must be from 0 to top_p=0.5"),
    ({"min_p": 2.0}, "min_p is 2.0"),
    ({"typical_p": 0.0}, "typical_p is 0.0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0"),
    ({"bad_words_ids": ((),)}, "sequences of at least one token"),
    ({"min_tokens": 20}, "min_tokens is 20; it must be from 0 to max_tokens=16"),
    ({"n": 3, "best_of": 2}, "best_of is 2; it must be n=3 or more"),
    ({"num_beams": 2, "n": 3}, "n is 3; it must be at most num_beams=2"),
    ({"num_beams": 2, "temperature": 0.7}, "has no temperature"),
    ({"num_beams": 2, "top_k": 5, "min_p": 0.1}, "has no top_k, min_p"),
    ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping is soon"),
    ({"regex": "a", "choices": ("b",)}, "regex and choices are given"),
    ({"regex": "a", "min_tokens": 3}, "regex says which tokens are allowed, and min_tokens could leave none"),
    ({"regex": 5}, "regex is 5; it must be a text"),
    ({"json_schema": [1]}, "json_schema is [1]; it must be a JSON schema: a text or an object"),
    ({"stop": ("a", "")}, "stop is ('a', ''); it must be texts of at least one character"),
    ({"stop": [1]}, "stop is [1]; it must be a list of texts"),
    ({"banned_token_ids": [32.0]}, "banned_token_ids is [32.0]; it must be a list of token ids"),
    ({"forced_tokens": [True]}, "forced_tokens is [True]; it must be a list of token ids"),
    ({"bad_words_ids": [32]}, "bad_words_ids is [32]; it must be a list of lists of token ids"),
    ({"logit_bias": {"+3": 1.0}}, "and '+3' is no id"),
    ({"logit_bias": {3: math.nan}}, "it must be a mapping to numbers from -1e+12 to 1e+12"),
    ({"temperature": math.inf}, "temperature is inf; it must be a number of at most 1e+12"),
    ({"frequency_penalty": math.nan}, "frequency_penalty is nan; it must be a number of at most 1e+12"),
    ({"presence_penalty": -1e308}, "presence_penalty is -1e+308"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300; it must be at least 1e-12"),
    ({"length_penalty": 1e308}, "length_penalty is 1e+308; it must be from -30 to 30"),
    ({"length_penalty": -1e308}, "length_penalty is -1e+308"),
    ({"top_k": 10**21}, "it must be at most 2147483647"),
    ({"max_tokens": 10**400}, "it must be at most 2147483647"),
    ({"n": 10**9}, "it must be at most 65536"),
]


@pytest.mark.parametrize(("keys", "words"), BAD_PARAMETERS, ids=lambda one: str(one)[:40])
def test_parameters_that_cannot_be(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParameters(**keys)
    assert words in str(caught.value)


def test_parameters_of_json_are_those_of_python() -> None:
    written = {"bad_words_ids": [[1, 2]], "logit_bias": {"32": -100}, "stop": "END", "stop_token_ids": [3]}
    expected = {"bad_words_ids": ((1, 2),), "logit_bias": {32: -100.0}, "stop": ("END",), "stop_token_ids": (3,)}
    assert SamplingParameters(**written) == SamplingParameters(**expected)


TOO_LARGE = "(a?){5000}a{5000}"
"""The package that constrains text accepts it, and gives up at the first token."""


def test_a_constraint_that_grows_too_large_is_an_error_of_its_line(generator: TextGenerator, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "a", "n": 2, "regex": TOO_LARGE}, {"prompt": "a"}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert generate_file(generator, source, target, SamplingParameters(max_tokens=3, temperature=0)).failed == 1
    first, second = map(json.loads, target.read_text().splitlines())
    assert first["error"].startswith("line 1: regex cannot be followed any further")
    assert second["completions"][0]["tokens"] == 3


def test_an_error_of_a_sequence_is_that_of_the_command(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert run(["generate", str(model), "--json", "--prompt", "a", "--n", "2", "--regex", TOO_LARGE]) == 2
    written = capsys.readouterr()
    assert [json.loads(line)["finish"] for line in written.out.splitlines()] == ["error"] * 2
    assert "regex cannot be followed any further" in written.err


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (SamplingParameters(stop_token_ids=(300,)), "stop_token_ids has the token 300; ids go from 0 to 260"),
        (SamplingParameters(logit_bias={-1: 1.0}), "logit_bias has the token -1"),
        (SamplingParameters(bad_words_ids=((1, 999),)), "bad_words_ids has the token 999"),
        (SamplingParameters(num_beams=2), "num_beams=2 makes several sequences"),
        (SamplingParameters(best_of=2), "best_of=2 makes several sequences"),
        (SamplingParameters(regex=TOO_LARGE), "regex cannot be followed any further"),
    ],
    ids=range(6),
)
def test_requests_that_cannot_be_streamed(generator: TextGenerator, sampling: SamplingParameters, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(generator.stream("a", sampling))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stop-token", "<end>"), "--stop-token: '<end>' is not one token of the tokenizer but 5"),
        (("--logit-bias", "q=much"), "--logit-bias: 'much' is no number"),
        (("--json-schema", "missing.json"), "--json-schema: 'missing.json' cannot be read"),
        (("--json-schema", '{"type": 3}'), "json_schema is not valid"),
        (("--logprobs", 1), "log-probabilities are shown with --json"),
        (("--set", "inference.speculative_method=draft_model"), "needs inference.speculative_model"),
        (("--set", "inference.speculative_method=mtp"), "layers of multi-token prediction"),
    ],
    ids=str,
)
def test_options_that_cannot_be(
    capsys: pytest.CaptureFixture[str], model: Path, options: tuple[Any, ...], words: str
) -> None:
    capsys.readouterr()
    assert run(["generate", str(model), "--prompt", "a", *map(str, options)]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


class EndsEachText:
    """A tokenizer that puts <s> and </s> around each text, as those of BART do."""

    class special:  # noqa: N801
        bos, eos, eod, pad = 0, 2, 2, 1

    vocab_size = 260

    def encode(self, text: str) -> list[int]:
        return [0, *(4 + byte for byte in text.encode()), 2]

    def decode(self, ids: list[int]) -> str:
        return bytes(one - 4 for one in ids if one > 3).decode()


def test_ids_around_each_text_are_no_part_of_a_forced_one() -> None:
    """An end behind it, also behind an empty one, would end every output before its first token."""
    options, tokenizer = SamplingOptions(stop_token=["a"]), EndsEachText()
    assert options.with_tokens(options.parameters(), tokenizer).forced_tokens == ()  # type: ignore[arg-type]
    forced = SamplingOptions(forced_text="ab", stop_token=["c"])
    found = forced.with_tokens(forced.parameters(), tokenizer)  # type: ignore[arg-type]
    assert found.forced_tokens == (101, 102)
    assert found.stop_token_ids == (103,)

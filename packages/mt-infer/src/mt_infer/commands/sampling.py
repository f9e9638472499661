"""Options of sampling, as the commands have them, and what they mean for a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mt_core.errors import ConfigError
from mt_infer.sampling.parameters import EarlyStopping, SamplingParameters

if TYPE_CHECKING:
    from mt_core.interfaces import Tokenizer

Texts = list[str] | None
SPACE = " "
DEFAULT_TEMPERATURE = 0.8
EARLY_STOPPING: Mapping[str, EarlyStopping] = MappingProxyType({"true": True, "false": False, "never": "never"})


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling, in the order of a command's help. One that has the name of a sampling parameter sets it."""

    max_tokens: Annotated[int, typer.Option(min=0, help="Tokens to add at most.")] = 200
    min_tokens: Annotated[int, typer.Option(help="No end of the document and no stop token before so many.")] = 0
    temperature: Annotated[
        float | None,
        typer.Option(help="Divides the logits; 0 takes the likeliest token.  [default: 0.8; 1 with beams]"),
    ] = None
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0
    top_p_decay: Annotated[float, typer.Option(help="Multiplies top-p after each token; 0: it stays.")] = 0.0
    top_p_bound: Annotated[float, typer.Option(help="Top-p does not decay below it.")] = 0.0
    min_p: Annotated[float, typer.Option(help="Keep tokens with this share of the likeliest one's probability.")] = 0.0
    typical_p: Annotated[float, typer.Option(help="Keep the most typical tokens up to this probability.")] = 1.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and text become less likely.")
    ] = 1.0
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted from a logit each time the token was generated.")
    ] = 0.0
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logits of tokens that were generated.")
    ] = 0.0
    logit_bias: Annotated[
        Texts, typer.Option(metavar="TOKEN=BIAS", help="Added to a token's logit; the token's id or text. Repeatable.")
    ] = None
    bad_words: Annotated[Texts, typer.Option(metavar="TEXT", help="Text that never appears. Repeatable.")] = None
    forced_text: Annotated[str, typer.Option(help="Text that the output begins with.")] = ""
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: another each time.")] = None
    stop: Annotated[Texts, typer.Option(help="Text before which the output ends. Repeatable.")] = None
    stop_token: Annotated[
        Texts, typer.Option(metavar="TOKEN", help="Token before which it ends; its id or text. Repeatable.")
    ] = None
    ignore_eod: Annotated[bool, typer.Option("--ignore-eod", help="Go on behind the end-of-document token.")] = False
    n: Annotated[int, typer.Option("--n", help="Sequences for each prompt.")] = 1
    best_of: Annotated[
        int | None, typer.Option(help="Choose the n sequences among so many, by mean log-probability.")
    ] = None
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities, with so many of the likeliest tokens.")] = (
        None
    )
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same of the prompt's tokens.")] = None
    num_beams: Annotated[int, typer.Option(help="Above 1: beam search with so many beams.")] = 1
    length_penalty: Annotated[float, typer.Option(help="A beam's log-probability is divided by length ^ this.")] = 1.0
    early_stopping: Annotated[
        Literal["true", "false", "never"], typer.Option(help="When beams end, as transformers defines it.")
    ] = "false"
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON schema that the text matches: a file, or the schema itself."),
    ] = None
    regex: Annotated[str | None, typer.Option(help="Regular expression that the text matches.")] = None
    grammar: Annotated[Path | None, typer.Option(metavar="FILE", help="Lark grammar that the text matches.")] = None
    choice: Annotated[Texts, typer.Option(metavar="TEXT", help="The text is one of these. Repeatable.")] = None

    def parameters(self) -> SamplingParameters:
        """The sampling parameters, before `with_tokens`. Raises ConfigError for a value that cannot be."""
        temperature = self.temperature
        if temperature is None:
            temperature = DEFAULT_TEMPERATURE if self.num_beams == 1 else 1.0
        names = {field.name for field in fields(self)} & {field.name for field in fields(SamplingParameters)}
        values = {name: getattr(self, name) for name in names} | {
            "temperature": temperature,
            "logit_bias": {},
            "stop": self.stop or (),
            "early_stopping": EARLY_STOPPING[self.early_stopping],
            "json_schema": _schema(self.json_schema),
            "grammar": None if self.grammar is None else read_text(self.grammar, "--grammar"),
            "choices": self.choice or (),
        }
        return SamplingParameters(**values)

    def with_tokens(self, sampling: SamplingParameters, tokenizer: Tokenizer) -> SamplingParameters:
        """Adds the options that name tokens by their text. Raises ConfigError for a text that is no token."""
        # From the right: a token's text may have "=" in it.
        biases = [bias.rpartition("=") for bias in self.logit_bias or ()]
        return replace(
            sampling,
            logit_bias={token_of(tokenizer, text, "--logit-bias"): _number(bias) for text, _, bias in biases},
            bad_words_ids=tuple(ids for word in self.bad_words or () for ids in spellings(tokenizer, word)),
            forced_tokens=tuple(within_text(tokenizer, self.forced_text)),
            stop_token_ids=tuple(token_of(tokenizer, text, "--stop-token") for text in self.stop_token or ()),
        )


def token_of(tokenizer: Tokenizer, text: str, option: str) -> int:
    """The id that is written in digits, or that the whole text encodes to. Raises ConfigError for another text."""
    if text.isascii() and text.isdecimal():
        return int(text)
    ids = within_text(tokenizer, text)
    if len(ids) != 1:
        raise ConfigError(
            f"{option}: {text!r} is not one token of the tokenizer but {len(ids)}; give an id, the text of one token"
            + (", or use --stop for a text" if option == "--stop-token" else "")
        )
    return ids[0]


def spellings(tokenizer: Tokenizer, word: str) -> set[tuple[int, ...]]:
    """The tokens of a word at the start of a text and behind a space."""
    encoded = {tuple(within_text(tokenizer, spelling)) for spelling in (word, SPACE + word)}
    return {ids for ids in encoded if ids}


def within_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text within a document. Without those that the tokenizer puts around each text: an end behind a forced
    text would end the output."""
    from mt_data.datasets.text_files import bare_encoder

    return list(bare_encoder(tokenizer)(text))


def read_text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {str(path)!r} cannot be read: {error}") from error


def _schema(value: str | None) -> str | None:
    """A file's content; a text that begins as JSON does is the schema itself."""
    return value if value is None or value.lstrip().startswith("{") else read_text(Path(value), "--json-schema")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--logit-bias: {text!r} is no number; give TOKEN=BIAS, such as 17=-2.5") from error

"""Options of sampling, as the commands have them, and what they mean for a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_core.interfaces import Tokenizer
    from mt_infer.sampling.parameters import SamplingParameters

Texts = list[str] | None
MAX_TOKENS = Annotated[int, typer.Option(min=0, help="Tokens to add at most.")]
MIN_TOKENS = Annotated[int, typer.Option(help="No end of the document and no stop token before so many.")]
TEMPERATURE = Annotated[
    float | None, typer.Option(help="Divides the logits; 0 takes the likeliest token.  [default: 0.8; 1 with beams]")
]
TOP_K = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TOP_P = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")]
TOP_P_DECAY = Annotated[float, typer.Option(help="Multiplies top-p after each token; 0: it stays.")]
TOP_P_BOUND = Annotated[float, typer.Option(help="Top-p does not decay below it.")]
MIN_P = Annotated[float, typer.Option(help="Keep tokens with this share of the likeliest one's probability.")]
TYPICAL_P = Annotated[float, typer.Option(help="Keep the most typical tokens up to this probability.")]
REPETITION_PENALTY = Annotated[float, typer.Option(help="Above 1: tokens of prompt and text become less likely.")]
FREQUENCY_PENALTY = Annotated[float, typer.Option(help="Subtracted from a logit each time the token was generated.")]
PRESENCE_PENALTY = Annotated[float, typer.Option(help="Subtracted from the logits of tokens that were generated.")]
LOGIT_BIAS = Annotated[
    Texts, typer.Option(metavar="TOKEN=BIAS", help="Added to a token's logit; the token's id or text. Repeatable.")
]
BAD_WORDS = Annotated[Texts, typer.Option(metavar="TEXT", help="Text that never appears. Repeatable.")]
FORCED_TEXT = Annotated[str, typer.Option(help="Text that the output begins with.")]
SEED = Annotated[int | None, typer.Option(help="Same seed, same text. Default: another each time.")]
STOP = Annotated[Texts, typer.Option(help="Text before which the output ends. Repeatable.")]
STOP_TOKEN = Annotated[
    Texts, typer.Option(metavar="TOKEN", help="Token before which it ends; its id or text. Repeatable.")
]
IGNORE_EOD = Annotated[bool, typer.Option("--ignore-eod", help="Go on behind the end-of-document token.")]
N = Annotated[int, typer.Option("--n", help="Sequences for each prompt.")]
BEST_OF = Annotated[int | None, typer.Option(help="Choose the n sequences among so many, by mean log-probability.")]
LOGPROBS = Annotated[int | None, typer.Option(help="Log-probabilities, with so many of the likeliest tokens.")]
PROMPT_LOGPROBS = Annotated[int | None, typer.Option(help="The same of the prompt's tokens.")]
NUM_BEAMS = Annotated[int, typer.Option(help="Above 1: beam search with so many beams.")]
LENGTH_PENALTY = Annotated[float, typer.Option(help="A beam's log-probability is divided by length ^ this.")]
EARLY_STOPPING = Annotated[
    Literal["true", "false", "never"], typer.Option(help="When beams end, as transformers defines it.")
]
JSON_SCHEMA = Annotated[
    str | None, typer.Option(metavar="FILE", help="JSON schema that the text matches: a file, or the schema itself.")
]
REGEX = Annotated[str | None, typer.Option(help="Regular expression that the text matches.")]
GRAMMAR = Annotated[Path | None, typer.Option(metavar="FILE", help="Lark grammar that the text matches.")]
CHOICE = Annotated[Texts, typer.Option(metavar="TEXT", help="The text is one of these. Repeatable.")]

SPACE = " "


@dataclass(frozen=True)
class TokenOptions:
    """Options that name tokens by their text."""

    logit_bias: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    forced_text: str = ""
    stop_tokens: Sequence[str] = ()

    def applied(self, sampling: SamplingParameters, tokenizer: Tokenizer) -> SamplingParameters:
        """Raises ConfigError for a text that is no token."""
        # From the right: a token's text may have "=" in it.
        biases = [bias.rpartition("=") for bias in self.logit_bias]
        return replace(
            sampling,
            logit_bias={token_of(tokenizer, text, "--logit-bias"): _number(bias) for text, _, bias in biases},
            bad_words_ids=tuple(ids for word in self.bad_words for ids in spellings(tokenizer, word)),
            forced_tokens=tuple(within_text(tokenizer, self.forced_text)),
            stop_token_ids=tuple(token_of(tokenizer, text, "--stop-token") for text in self.stop_tokens),
        )


def sampling_of(values: Mapping[str, Any]) -> SamplingParameters:
    """values: of the options above that name no tokens, in SamplingParameters' names."""
    from mt_infer.sampling.parameters import SamplingParameters

    given = dict(values)
    if given["temperature"] is None:
        given["temperature"] = 0.8 if given["num_beams"] == 1 else 1.0
    given["early_stopping"] = {"true": True, "false": False}.get(given["early_stopping"], given["early_stopping"])
    given["json_schema"] = _schema(given["json_schema"])
    given["grammar"] = None if given["grammar"] is None else read_text(given["grammar"], "--grammar")
    return SamplingParameters(**given)


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
    found = {tuple(within_text(tokenizer, spelling)) for spelling in (word, SPACE + word)}
    return {ids for ids in found if ids}


def within_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that is not the first of a document."""
    ids = list(tokenizer.encode(text))
    # BOS that the tokenizer writes at the start of every text.
    return ids[1:] if ids and ids[0] == tokenizer.special.bos else ids


def read_text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {str(path)!r} cannot be read: {error}") from error


def _schema(given: str | None) -> str | None:
    """A file's content; a text that begins as JSON does is the schema itself."""
    return given if given is None or given.lstrip().startswith("{") else read_text(Path(given), "--json-schema")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--logit-bias: {text!r} is no number; give TOKEN=BIAS, such as 17=-2.5") from error

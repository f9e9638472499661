"""The sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal

from mt_core.errors import ConfigError

# The lists of sampling parameters: from what files, requests and programs give to tuples of checked elements.

LARGEST_NUMBER = 1e12
"""Limit of biases and penalties: together they stay far from the largest number of fp32."""
SHOWN = 80
"""Characters of a value in a message."""
DIGITS = 20
"""Digits of an id that is a text."""


def is_integer(value: object) -> bool:
    # bool is an Integral in Python; NumPy's integers are too.
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not _is_list(value, is_integer):
        raise refused(name, value, "a list of token ids")
    return tuple(int(token) for token in value)


def token_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not _is_list(value, lambda element: _is_list(element, is_integer)):
        raise refused(name, value, "a list of lists of token ids")
    return tuple(token_ids(name, element) for element in value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    if not _is_list(value, lambda element: isinstance(element, str)):
        raise refused(name, value, "a list of texts")
    return tuple(value)


def stop_texts(name: str, value: Any) -> tuple[str, ...]:
    """A text by itself is one stop text, as in OpenAI's interface."""
    stops = texts(name, [value] if isinstance(value, str) else value)
    if "" in stops:
        raise refused(name, value, "texts of at least one character, since an empty one ends every text")
    return stops


def token_biases(name: str, value: Any) -> Mapping[int, float]:
    """Ids may be texts of digits, as the keys of JSON objects are."""
    if not isinstance(value, Mapping):
        raise refused(name, value, "a mapping from token ids to numbers")
    for token, bias in value.items():
        if not (is_integer(token) or _is_digits(token)):
            raise refused(name, value, f"a mapping from token ids to numbers, and {token!r:.{SHOWN}} is no id")
        if not is_number(bias) or not abs(bias) <= LARGEST_NUMBER:
            raise refused(name, value, f"a mapping to numbers from -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}")
    return {int(token): float(bias) for token, bias in value.items()}


def refused(name: str, value: object, allowed: str) -> ConfigError:
    shown = repr(value)
    return ConfigError(f"{name} is {shown if len(shown) <= SHOWN else shown[:SHOWN] + ' ...'}; it must be {allowed}")


def _is_list(value: object, is_element: Callable[[object], bool]) -> bool:
    # A text is a Sequence of texts.
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and all(is_element(element) for element in value)  # type: ignore[attr-defined]


def _is_digits(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= DIGITS


READERS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "logit_bias": token_biases,
        "banned_token_ids": token_ids,
        "bad_words_ids": token_sequences,
        "forced_tokens": token_ids,
        "stop": stop_texts,
        "stop_token_ids": token_ids,
        "choices": texts,
    }
)
"""By the name of the parameter."""


EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class SamplingParameters:
    """How tokens are chosen, and when a sequence ends. The defaults sample from the model's own distribution.

    docs/guides/sampling.md defines each, with its source. In the order in which they are applied to the logits:

    logit_bias: token -> what is added. repetition_penalty: divides positive logits and multiplies negative ones of
    tokens that are in the prompt or generated. frequency_penalty, presence_penalty: subtracted from the logit for each
    time, and for once, that a token was generated. banned_token_ids: never chosen. bad_words_ids: sequences of tokens
    that never appear. min_tokens: no end before so many. forced_tokens: what the generated text begins with.

    temperature: divides the logits; 0 takes the likeliest token, and leaves out what follows. top_k: keep so many
    tokens; 0 keeps all. top_p: keep the likeliest tokens up to this probability; after each token it is multiplied by
    top_p_decay (0: it stays), down to top_p_bound. min_p: keep tokens with this share of the likeliest one's
    probability. typical_p: keep the tokens closest to the expected information, up to this probability.

    max_tokens: generated at most. stop: texts before which the text ends. stop_token_ids: tokens before which it ends,
    beside the tokenizer's end of document (unless ignore_eod). seed: the same seed gives the same tokens, whatever else
    runs; None: another each time. n: number of sequences; best_of: the n with the best mean log-probability of so many.
    logprobs: how many likeliest tokens to report beside each sampled one; None: no log-probabilities. prompt_logprobs:
    the same of the prompt's tokens, from number prompt_logprobs_start on; those before it may come from the cache.
    drawn_logprobs: of sampled tokens report those of the logits divided by the temperature, as training by rewards
    computes them.

    num_beams: above 1, beam search; then n of the beams are returned, early_stopping and length_penalty are those of
    transformers.

    json_schema, regex, grammar (Lark), choices: the text matches; one of them at most.

    priority: requests with a lower number are computed before others, and give up their memory after them; those with
    the same number in order of arrival. It changes no token.

    Lists may be given for tuples, one text for `stop`, and texts of digits for the ids of logit_bias. A temperature
    below LOWEST_TEMPERATURE is taken as 0. Raises ConfigError for values that cannot be.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_tokens: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eod: bool = False
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choices: tuple[str, ...] = ()
    priority: int = 0
    drawn_logprobs: bool = False

    def __post_init__(self) -> None:
        # object.__setattr__: the dataclass is frozen. Lists first: what they may hold is checked by their readers.
        for name, read in READERS.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))
        self._check_types()
        for name, holds, allowed in self._checks():
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {allowed}")
        self._check_beams()
        self._check_constraint()
        # After the checks, which refuse negative ones.
        if self.temperature < LOWEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    def _check_types(self) -> None:
        """Checks all but lists: a value from a file, a program or an option may be of any type."""
        for entry in fields(self):
            # Annotations are texts here (from __future__ import annotations): they are the keys of TYPES.
            value, kind = getattr(self, entry.name), str(entry.type).removesuffix(" | None")
            if kind not in TYPES or (value is None and str(entry.type).endswith(" | None")):
                continue
            is_one, allowed = TYPES[kind]
            if not is_one(value):
                raise refused(entry.name, value, allowed)

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Name, whether it holds, what is allowed."""
        bound, decay = self.top_p_bound, self.top_p_decay
        yield "temperature", self.temperature >= 0, "0 (greedy) or more"
        yield "top_k", self.top_k >= 0, "0 (all tokens) or more"
        yield "top_p", 0 < self.top_p <= 1, "above 0 and at most 1"
        yield "top_p_decay", 0 <= decay <= 1, "from 0 (none) to 1"
        yield "top_p_decay", not decay or self.top_p < 1, "0 where top_p is 1, which keeps all tokens"
        yield "top_p_bound", 0 <= bound <= self.top_p, f"from 0 to top_p={self.top_p}"
        yield "top_p_bound", not bound or decay > 0, "0 without top_p_decay"
        yield "min_p", 0 <= self.min_p <= 1, "from 0 (all tokens) to 1"
        yield "typical_p", 0 < self.typical_p <= 1, "above 0 and at most 1"
        yield "repetition_penalty", self.repetition_penalty > 0, "above 0 (1 is none)"
        yield "bad_words_ids", all(self.bad_words_ids), "sequences of at least one token"
        yield "max_tokens", self.max_tokens >= 0, "0 or more"
        yield "min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens={self.max_tokens}"
        yield "n", self.n >= 1, "1 or more"
        yield "best_of", self.best_of is None or self.best_of >= self.n, f"n={self.n} or more"
        yield "logprobs", (self.logprobs or 0) >= 0, "0 or more"
        yield "prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "0 or more"
        yield "prompt_logprobs_start", self.prompt_logprobs_start >= 0, "0 or more"
        yield "num_beams", self.num_beams >= 1, "1 (no beam search) or more"
        yield "early_stopping", self.early_stopping in (True, False, "never"), 'True, False or "never"'
        yield from self._bounds()

    def _bounds(self) -> Iterator[tuple[str, bool, str]]:
        """Further checks: what later computations with a number of fp32 or int64 can hold."""
        yield "repetition_penalty", self.repetition_penalty >= 1 / LARGEST_NUMBER, f"at least {1 / LARGEST_NUMBER:g}"
        steepest = LARGEST_LENGTH_PENALTY
        yield "length_penalty", abs(self.length_penalty) <= steepest, f"from -{steepest:g} to {steepest:g}"
        for name in ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            is_finite = abs(getattr(self, name)) <= LARGEST_NUMBER
            yield name, is_finite, f"a number of at most {LARGEST_NUMBER:g}"
        yield "priority", abs(self.priority) <= LARGEST_INTEGER, f"from -{LARGEST_INTEGER} to {LARGEST_INTEGER}"
        for name in ("n", "best_of"):
            yield name, (getattr(self, name) or 0) <= MOST_SEQUENCES, f"at most {MOST_SEQUENCES}"
        for name in ("top_k", "max_tokens", "logprobs", "prompt_logprobs", "prompt_logprobs_start", "num_beams"):
            yield name, (getattr(self, name) or 0) <= LARGEST_INTEGER, f"at most {LARGEST_INTEGER}"

    def _check_beams(self) -> None:
        if self.num_beams == 1:
            return
        if self.n > self.num_beams:
            raise ConfigError(f"n is {self.n}; it must be at most num_beams={self.num_beams}, since beams are returned")
        wrong = [name for name, asked in self._sampling_only().items() if asked]
        if wrong:
            raise ConfigError(
                f"beam search (num_beams={self.num_beams}) takes the likeliest sequences of the model's distribution "
                f"and has no {', '.join(wrong)}; leave out one or the other"
            )

    def _sampling_only(self) -> dict[str, bool]:
        return {
            "temperature": self.temperature not in (0.0, 1.0),
            "top_k": self.top_k > 0,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "typical_p": self.typical_p < 1,
            "best_of": self.best_of is not None,
        }

    def _check_constraint(self) -> None:
        constraints = [name for name in CONSTRAINTS if getattr(self, name) not in (None, ())]
        if len(constraints) > 1:
            raise ConfigError(f"{' and '.join(constraints)} are given; a text can be constrained by one of them")
        others = ("min_tokens", "banned_token_ids", "bad_words_ids", "forced_tokens", "ignore_eod")
        wrong = [name for name in others if getattr(self, name)]
        if constraints and wrong:
            raise ConfigError(
                f"{constraints[0]} says which tokens are allowed, and {' and '.join(wrong)} could leave none; "
                "leave out one or the other"
            )

    @cached_property
    def constraint(self) -> tuple[str, Any] | None:
        """Its name and value."""
        constraints = [(name, getattr(self, name)) for name in CONSTRAINTS]
        return next(((name, value) for name, value in constraints if value not in (None, ())), None)

    @property
    def sequences(self) -> int:
        """Number of sequences that are generated, each with events of its own."""
        return self.best_of or self.n

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether anything before the temperature is requested."""
        return bool(
            self.logit_bias
            or self.penalizes
            or self.banned_token_ids
            or self.bad_words_ids
            or self.forced_tokens
            or self.min_tokens
            or self.constraint
        )

    @cached_property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def truncates(self) -> bool:
        """Whether some tokens that the model allows cannot be drawn."""
        return (self.top_k, self.top_p, self.min_p, self.typical_p) != (0, 1.0, 0.0, 1.0)

    def top_p_at(self, index: int) -> float:
        """For generated token number `index`, from 0: top_p * top_p_decay^index, at least top_p_bound (Megatron-LM)."""
        return max(self.top_p * self.top_p_decay**index, self.top_p_bound) if self.top_p_decay else self.top_p

    def named_tokens(self) -> Iterator[tuple[str, int]]:
        """Each token id that is named, with the name of its parameter."""
        for name in ("logit_bias", "banned_token_ids", "forced_tokens", "stop_token_ids"):
            yield from ((name, token) for token in getattr(self, name))
        yield from (("bad_words_ids", token) for word in self.bad_words_ids for token in word)


TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "float": (is_number, "a number"),
    "int": (is_integer, "an integer"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "str | Mapping[str, Any]": (lambda value: isinstance(value, str | Mapping), "a JSON schema: a text or an object"),
}
LOWEST_TEMPERATURE = 1e-5
"""Below it, the likeliest token has all of the probability: 0 says the same without an overflow."""
LARGEST_LENGTH_PENALTY = 30.0
"""A length of 31 bits to the power of it is a number of fp64, and so is a score that is multiplied by it."""
LARGEST_INTEGER = 2**31 - 1
MOST_SEQUENCES = 2**16
"""Sequences of a request at most: each takes memory as soon as it waits."""
CONSTRAINTS = ("json_schema", "regex", "grammar", "choices")

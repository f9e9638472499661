"""Fill-in-the-middle: some documents are rearranged so that a model learns to write what stands between two texts.

The arrangement follows Megatron's FIM data set. Unlike there, the random choices of a sample depend on the
seed and the number of the sample alone, so that they are the same for any number of readers and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from mt_core.config.fields import Probability
from mt_core.errors import ConfigError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.gpt import GPTDataConfig, GPTDataset, build_gpt_files, gpt_over_file
from mt_data.datasets.opening import BuiltSplit, OpenedTokens
from mt_data.datasets.samples import SampleRules

MARKS = ("prefix", "middle", "suffix")


class FIMDataConfig(GPTDataConfig):
    """The samples of `gpt`, with documents cut into prefix, middle and suffix and put in another order."""

    dataset_type: str = "fim"
    fim_rate: Probability = 0.5
    """Share of the documents (within a sample) that are rearranged."""
    fim_spm_rate: Probability = 0.5
    """Share of these in the order suffix, prefix, middle; the others are prefix, suffix, middle."""
    fim_split_sample: str | None = None
    """Rearrange the fragments between occurrences of this text (one token), each by itself."""
    fim_fragment_rate: Probability | None = None
    """Share of the fragments that are rearranged, of a document chosen by fim_rate. Default: fim_rate."""
    fim_no_prefix: str | None = None
    """Leave documents (or fragments) alone that begin with this text."""
    fim_prefix_token: str = "<fim_prefix>"
    """Text of the token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Text of the token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Text of the token before the suffix."""
    fim_token_ids: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Ids of "prefix", "middle" and "suffix", for a tokenizer whose tokens have no such texts."""


@dataclass(frozen=True)
class FIMRules:
    """The configuration with its texts as ids."""

    prefix: int
    middle: int
    suffix: int
    eod: int
    split: int | None
    config: FIMDataConfig

    @classmethod
    def of(cls, config: FIMDataConfig, tokenizer: Tokenizer) -> FIMRules:
        """Raises ConfigError when a mark is no single id, two are the same, or there is no eod id."""
        if unknown := sorted(set(config.fim_token_ids) - set(MARKS)):
            raise ConfigError(f"data.fim_token_ids has the key {unknown[0]}; allowed are {', '.join(MARKS)}")
        ids = {mark: _mark_id(config, tokenizer, mark) for mark in MARKS}
        if len(set(ids.values())) < len(MARKS):
            raise ConfigError(f"the ids of prefix, middle and suffix must differ, they are {ids}")
        if tokenizer.special.eod is None:
            raise ConfigError('data.dataset_type="fim" needs an end-of-document id, and the tokenizer has none')
        if config.fim_fragment_rate is not None and config.fim_split_sample is None:
            raise ConfigError("data.fim_fragment_rate only counts with data.fim_split_sample")
        split = config.fim_split_sample
        split_id = None if split is None else _single_id(tokenizer, split, "fim_split_sample")
        return cls(**ids, eod=tokenizer.special.eod, split=split_id, config=config)


def _mark_id(config: FIMDataConfig, tokenizer: Tokenizer, mark: str) -> int:
    token_id = config.fim_token_ids.get(mark)
    if token_id is None:
        return _single_id(tokenizer, getattr(config, f"fim_{mark}_token"), f"fim_{mark}_token")
    if token_id >= tokenizer.vocab_size:
        raise ConfigError(f"data.fim_token_ids.{mark}={token_id} is past the tokenizer's {tokenizer.vocab_size} ids")
    return token_id


def _single_id(tokenizer: Tokenizer, text: str, key: str) -> int:
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise ConfigError(
            f'data.{key}="{text}" is {len(ids)} ids in this tokenizer, it must be one; name a token that the '
            "tokenizer has, or give ids with data.fim_token_ids"
        )
    return ids[0]


def build_fim(config: FIMDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of CAUSAL_LM_SAMPLE for `request.split`, rearranged; None when it has no data."""
    sample_rules = SampleRules.of(config, tokenizer, config.allow_ambiguous_pad_tokens)
    rules = FIMRules.of(config, tokenizer)

    def make(tokens: OpenedTokens, num_samples: int | None) -> FIMDataset:
        samples = gpt_over_file(tokens, num_samples, config, sample_rules, request)
        return FIMDataset(samples, rules, tokenizer, request.seed)

    return build_gpt_files(config, tokenizer, request, make)


class FIMDataset:
    """The samples of a GPT data set, rearranged; lengths stay the same, the end is cut or padded."""

    def __init__(self, samples: GPTDataset, rules: FIMRules, tokenizer: Tokenizer, seed: int) -> None:
        self.samples = samples
        self.rules = rules
        self.tokenizer = tokenizer
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        plan = self.samples.plan
        size = plan.sequence_length + plan.extra
        # A generator for each sample; Megatron's data set has one for all, so that its choices depend on the order of
        # reading.
        random = np.random.default_rng([self.seed, index])
        # Three marks a document make it longer; what passes the window is cut off at its end, as in Megatron.
        arranged = rearrange_documents(self.samples.tokens(index), self.rules, self.tokenizer, random)[:size]
        result = np.full(size, self.samples.rules.pad, np.int64)
        result[: len(arranged)] = arranged
        return self.samples.sample_of(result)

    def fingerprint(self) -> str:
        """The content of the token file."""
        return self.samples.fingerprint()

    def describe(self, index: int) -> str:
        return f"{self.samples.describe(index)} (rearranged for fill-in-the-middle)"


def rearrange_documents(
    tokens: NDArray[np.int64], rules: FIMRules, tokenizer: Tokenizer, random: np.random.Generator
) -> NDArray[np.int64]:
    """[tokens] -> [about as many]: each piece between end-of-document ids rearranged or left, by chance."""
    arranged: list[int] = []
    for piece, ended in _split_at(tokens.tolist(), rules.eod):
        arranged += _rearrange_document(piece, rules, tokenizer, random)
        arranged += [rules.eod] if ended else []
    return np.asarray(arranged, np.int64)


def _split_at(tokens: list[int], separator: int) -> Iterator[tuple[list[int], bool]]:
    """The pieces between separators, and whether a separator follows."""
    start = 0
    # tokens 7 0 8 with the separator 0: ([7], True), ([8], False)
    for place, token in enumerate(tokens):
        if token == separator:
            yield tokens[start:place], True
            start = place + 1
    yield tokens[start:], False


def _rearrange_document(
    tokens: list[int], rules: FIMRules, tokenizer: Tokenizer, random: np.random.Generator
) -> list[int]:
    config = rules.config
    if not tokens or random.random() >= config.fim_rate:
        return tokens
    if rules.split is None or rules.split not in tokens:
        return _rearrange(tokens, rules, tokenizer, random)
    rate = config.fim_rate if config.fim_fragment_rate is None else config.fim_fragment_rate
    arranged: list[int] = []
    for fragment, ended in _split_at(tokens, rules.split):
        chosen = bool(fragment) and random.random() < rate
        arranged += _rearrange(fragment, rules, tokenizer, random) if chosen else fragment
        arranged += [rules.split] if ended else []
    return arranged


def _rearrange(tokens: list[int], rules: FIMRules, tokenizer: Tokenizer, random: np.random.Generator) -> list[int]:
    text = tokenizer.decode(tokens)
    if rules.config.fim_no_prefix is not None and text.startswith(rules.config.fim_no_prefix):
        return tokens
    prefix, middle, suffix = _three_parts(tokens, text, tokenizer, random)
    if random.random() < rules.config.fim_spm_rate:
        # SPM in the form of Bavarian et al. 2022 that joins prefix and middle behind one mark, which Megatron uses too.
        return [rules.prefix, rules.suffix, *suffix, rules.middle, *prefix, *middle]
    return [rules.prefix, *prefix, rules.suffix, *suffix, rules.middle, *middle]


def _three_parts(
    tokens: list[int], text: str, tokenizer: Tokenizer, random: np.random.Generator
) -> tuple[list[int], list[int], list[int]]:
    """The text cut at two random characters, as ids; any part may be empty.

    Tokens that do not come back from their text (a window can begin or end within a character) are cut
    between ids instead, so that nothing in them changes.
    """
    if tokenizer.encode(text) != tokens:
        first, second = sorted(random.integers(0, len(tokens) + 1, 2).tolist())
        return tokens[:first], tokens[first:second], tokens[second:]
    first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
    encode = tokenizer.encode
    return encode(text[:first]), encode(text[first:second]), encode(text[second:])

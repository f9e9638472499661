"""tiktoken vocabularies: Megatron's JSON form, with special ids first, and plain rank files (`.tiktoken`)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from mt_core.errors import ConfigError, DataError
from mt_data.tokenizers import base as names
from mt_data.tokenizers.base import BaseTokenizer, FileTokenizerConfig, decode_utf8, parse_json, read_file
from mt_data.tokenizers.engines import ENGINE_PATTERNS, PATTERNS, PatternName, TiktokenEngine, prefix_free
from mt_data.tokenizers.limits import LARGEST_ID

KEY = "tokenizer_model"
JSON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
JSON_REQUIRED = ("<unk>", "<s>", "</s>")
DEFAULT_VOCAB_SIZE = 2**17
DEFAULT_NUM_SPECIAL_TOKENS = 1000


class TikTokenConfig(FileTokenizerConfig):
    """A JSON list of `{"rank", "token_bytes", "token_str"}`, or lines of base64 bytes and rank."""

    file_keys: ClassVar[Mapping[str, str]] = {KEY: "tokenizer.model"}

    tokenizer_type: str = "TikTokenizer"
    tokenizer_model: str
    """The vocabulary. JSON differs from rank lines in its first character."""
    tiktoken_pattern: PatternName = "v2"
    """How text is cut before merging: v1 and v2 are Megatron's, gpt2, cl100k and o200k are OpenAI's. It must
    be the one that the vocabulary was made with."""
    vocab_size: PositiveInt | None = None
    """JSON: number of ids, special ones included; further entries of the file are not used. Default: 131072.
    Rank file: checked against the file when given."""
    tiktoken_num_special_tokens: NonNegativeInt | None = None
    """Number of special ids; unnamed ones are called <SPECIAL_n>. Default: 1000 for JSON, where they come
    before the others; as many as are named for a rank file, where they come after."""
    tokenizer_special_tokens: list[str] | None = None
    """Names of the special ids in order. Default: <unk> <s> </s> <mask> <pad> <cls> <sep> for JSON, which
    needs at least the first three; <|endoftext|> for a rank file."""
    vocab_extra_ids: NonNegativeInt = 0
    """Number of T5 sentinels, `<extra_id_0>` and on; they follow the other named special ids."""


class TikTokenizer(BaseTokenizer):
    """eos (and eod) is </s>, <|endoftext|> or <|end_of_text|>; special tokens in the text become their ids."""

    def __init__(self, config: TikTokenConfig) -> None:
        data = read_file(config.tokenizer_model, KEY)
        # Neither bracket occurs in base64.
        if data.lstrip()[:1] in (b"[", b"{"):
            ranks, special = _json_layout(data, config)
        else:
            ranks, special = _rank_layout(data, config)
        _check_overlap(ranks, special, config)
        super().__init__(
            vocab_size=max(*ranks.values(), *special.values()) + 1,
            special=names.by_common_names(special.get, config.vocab_extra_ids),
            files={"tokenizer.model": data},
            options={
                "type": "TikTokenizer",
                # The expression itself and not its name: a change of the expression changes the ids.
                "pattern": PATTERNS[config.tiktoken_pattern],
                "special": special,
                "ranks": len(ranks),
            },
        )
        self._engine = TiktokenEngine(ranks, special, ENGINE_PATTERNS[config.tiktoken_pattern])

    def _encode(self, text: str) -> np.ndarray:
        return self._engine.encode(text)

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._engine.decode(ids)
        except KeyError as error:
            raise DataError(f"id {error.args[0]} stands for no token of this vocabulary") from error

    def _token_bytes(self) -> dict[int, bytes]:
        return self._engine.token_bytes()


def _json_layout(data: bytes, config: TikTokenConfig) -> tuple[dict[bytes, int], dict[str, int]]:
    """Special ids 0 to n - 1, then the file's tokens, cut to vocab_size in all."""
    vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
    default = DEFAULT_NUM_SPECIAL_TOKENS
    count = default if config.tiktoken_num_special_tokens is None else config.tiktoken_num_special_tokens
    listed = _special_names(config, JSON_SPECIAL_TOKENS, count)
    missing = [name for name in JSON_REQUIRED if name not in listed]
    if missing:
        raise ConfigError(f"tokenizer.tokenizer_special_tokens lacks {', '.join(missing)}; list them too")
    if count >= vocab_size:
        raise ConfigError(
            f"tokenizer.tiktoken_num_special_tokens={count} leaves no id of tokenizer.vocab_size={vocab_size}"
        )
    tokens = _parse_json_vocab(data, config.tokenizer_model)
    if len(tokens) < vocab_size - count:
        raise DataError(
            f"tokenizer.{KEY}={config.tokenizer_model!r} has {len(tokens)} tokens, tokenizer.vocab_size={vocab_size} "
            f"less {count} special ones needs {vocab_size - count}; set vocab_size to at most {len(tokens) + count}"
        )
    # Megatron-LM: reload_mergeable_ranks and the offset of num_special_tokens; special ids are 0 to count - 1.
    ranks = {token: count + rank for rank, token in enumerate(tokens[: vocab_size - count])}
    return ranks, {name: token for token, name in enumerate(listed)}


def _rank_layout(data: bytes, config: TikTokenConfig) -> tuple[dict[bytes, int], dict[str, int]]:
    """The file's ranks are the ids; special ids follow the highest."""
    ranks = _parse_ranks(data, config.tokenizer_model)
    listed = _special_names(config, ("<|endoftext|>",), config.tiktoken_num_special_tokens)
    first = max(ranks.values()) + 1
    if config.vocab_size not in (None, first + len(listed)):
        raise ConfigError(
            f"tokenizer.vocab_size={config.vocab_size}, but tokenizer.{KEY}={config.tokenizer_model!r} has ids up "
            f"to {first - 1} and {len(listed)} special ones follow: {first + len(listed)}; leave vocab_size out"
        )
    return ranks, {name: first + number for number, name in enumerate(listed)}


def _special_names(config: TikTokenConfig, default: Iterable[str], count: int | None) -> list[str]:
    """Named special tokens, filled up with <SPECIAL_n> to `count`."""
    special_tokens = config.tokenizer_special_tokens
    listed = names.added_names([*default] if special_tokens is None else special_tokens, config.vocab_extra_ids)
    if special_tokens is not None and len(set(special_tokens)) != len(special_tokens):
        twice = next(name for name in special_tokens if special_tokens.count(name) > 1)
        raise ConfigError(f"tokenizer.tokenizer_special_tokens lists {twice!r} twice")
    if count is None:
        return listed
    if len(listed) > count:
        raise ConfigError(
            f"tokenizer.tiktoken_num_special_tokens={count} is less than the {len(listed)} special tokens named"
        )
    return [*listed, *(f"<SPECIAL_{number}>" for number in range(len(listed), count))]


def _check_overlap(ranks: dict[bytes, int], special: dict[str, int], config: TikTokenConfig) -> None:
    if not prefix_free(special):
        raise ConfigError(
            "tokenizer.tokenizer_special_tokens: one of the special tokens begins with another one, so that text "
            f"could be read in two ways: {sorted(special)[:20]}"
        )
    for name in special:
        if name.encode() in ranks:
            raise ConfigError(
                f"the special token {name!r} is an ordinary token of tokenizer.{KEY}={config.tokenizer_model!r} as "
                "well; name it otherwise in tokenizer.tokenizer_special_tokens"
            )


def _parse_json_vocab(data: bytes, path: str) -> list[bytes]:
    """Bytes of the tokens by rank."""
    value = parse_json(data, path, KEY)
    if not isinstance(value, list):
        raise DataError(
            f"tokenizer.{KEY}={path!r} holds a JSON object; Megatron's form is a list of objects with rank, "
            "token_bytes and token_str"
        )
    tokens = []
    for number, entry in enumerate(value):
        if not isinstance(entry, dict) or not {"rank", "token_bytes"} <= entry.keys():
            raise DataError(f"tokenizer.{KEY}={path!r} entry {number}: needs rank and token_bytes, got {entry!r:.80}")
        if entry["rank"] != number:
            raise DataError(f"tokenizer.{KEY}={path!r} entry {number} has rank {entry['rank']!r}; ranks count from 0")
        tokens.append(_unbase64(entry["token_bytes"], f"tokenizer.{KEY}={path!r} entry {number}"))
    _check_tokens(tokens, path)
    return tokens


def _parse_ranks(data: bytes, path: str) -> dict[bytes, int]:
    """Lines of base64 bytes, one space and the rank."""
    ranks: dict[bytes, int] = {}
    owner: dict[int, int] = {}
    for number, line in enumerate(decode_utf8(data, path, KEY).splitlines(), start=1):
        if not line:
            continue
        where = f"tokenizer.{KEY}={path!r} line {number}"
        text, _, rank = line.partition(" ")
        if not rank.isascii() or not rank.isdigit():
            raise DataError(f"{where}: {line!r:.80} is not base64 bytes, a space and a rank")
        place = _id_of(rank, where)
        if place in owner:
            raise DataError(f"{where}: the rank {rank} stands already in line {owner[place]}")
        owner[place] = number
        token = _unbase64(text, where)
        if token in ranks:
            raise DataError(f"{where}: the token {token!r} stands already in line {owner[ranks[token]]}")
        ranks[token] = place
    _check_tokens(ranks, path)
    return ranks


def _id_of(digits: str, where: str) -> int:
    # The length first: Python refuses to convert thousands of digits with an error of its own.
    if len(digits) > len(str(LARGEST_ID)) or int(digits) > LARGEST_ID:
        raise DataError(f"{where}: the rank {digits:.20} is above {LARGEST_ID}, the largest id of a tokenizer")
    return int(digits)


def _unbase64(text: object, where: str) -> bytes:
    try:
        token = base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: {text!r:.80} is not base64 ({error})") from error
    if not token:
        raise DataError(f"{where}: an empty token")
    return token


def _check_tokens(tokens: Iterable[bytes], path: str) -> None:
    known: set[bytes] = set()
    for number, token in enumerate(tokens):
        if token in known:
            raise DataError(f"tokenizer.{KEY}={path!r} entry {number}: the token {token!r} stands there twice")
        known.add(token)
    # tiktoken panics on a byte that is no token.
    missing = [byte for byte in range(256) if bytes([byte]) not in known]
    if missing:
        raise DataError(
            f"tokenizer.{KEY}={path!r} lacks {len(missing)} of the 256 single bytes (0x{missing[0]:02x} first), so "
            "some texts could not be written"
        )


def build_tik_token(config: TikTokenConfig) -> TikTokenizer:
    """Read the vocabulary; raises DataError for a damaged file, ConfigError for keys that do not fit it."""
    return TikTokenizer(config)

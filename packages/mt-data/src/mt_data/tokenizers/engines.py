"""The two libraries that do the byte-pair encoding, behind one small interface.

With `ENGINE_PATTERNS` tiktoken is ten times as fast as `tokenizers`; both give the same ids wherever tiktoken is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from mt_core.errors import DataError
from mt_data.tokenizers.merges import byte_alphabet

if TYPE_CHECKING:
    import tiktoken
    import tokenizers


# -- patterns that cut text into the pieces within which byte pairs are merged -----------------------
#
# Each is the published one of its tokenizer; ids agree only if this does. `ENGINE_PATTERNS` cut the same pieces in
# less time.

PatternName = Literal["v1", "v2", "gpt2", "cl100k", "o200k"]

_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s"
_SYMBOLS_AND_LINE_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
_V2 = rf"{_CASED % ('', '')}|\p{{N}}|{_SYMBOLS_AND_LINE_ENDS}"
_O200K = rf"{_CASED % (_CONTRACTION, _CONTRACTION)}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_LINE_ENDS}"
# Takes a run of white space but for its last character, which the alternative of the next word (` ?...`) takes:
# "a   b" becomes "a", "  ", " b".
_SPACES = r"\s+(?!\S)"

PATTERNS: dict[PatternName, str] = {
    "v1": rf"[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}|\s+",
    "v2": rf"{_V2}|{_SPACES}|\s+",
    "gpt2": rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}++| ?\p{{N}}++| ?[^\s\p{{L}}\p{{N}}]++|\s++$|{_SPACES}|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    rf"|\s++$|\s*[\r\n]|{_SPACES}|\s",
    "o200k": rf"{_O200K}|{_SPACES}|\s+",
}
"""Published patterns: v1 and v2 by Megatron, gpt2, cl100k and o200k by OpenAI."""

# tiktoken's matcher backtracks over alternatives one by one, but runs a group without look-ahead and possessive
# quantifiers as one automaton. `\z` is `$` where that would mean the end of a line, as in Oniguruma.
ENGINE_PATTERNS: dict[PatternName, str] = {
    "v1": rf"(?:[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n])|{_SPACES}|\s+",
    "v2": rf"(?:{_V2})|{_SPACES}|\s+",
    "gpt2": rf"(?:'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+\z)|{_SPACES}|\s",
    "cl100k": r"(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    rf"|\s+\z|\s*[\r\n])|{_SPACES}|\s",
    "o200k": rf"(?:{_O200K})|{_SPACES}|\s+",
}
"""The same pieces in less time, for tiktoken's regular expressions and for Oniguruma."""


LONG_WHITESPACE = 500_000
"""Characters. The regular expressions of tiktoken panic on a run of a million white spaces: their stack is full."""
SPACE = "\u2581"
_NO_SPECIAL: frozenset[str] = frozenset()


class Engine(Protocol):
    """Text to ids and back; special tokens that stand in the text become their ids."""

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: list[int]) -> str: ...

    def token_bytes(self) -> dict[int, bytes] | None:
        """Bytes of the ids that are not special; None where these depend on neighbours."""
        ...


def _is_of_library(error: BaseException) -> bool:
    """Whether the tokenizers library has raised it: bare Exception, as where the unknown token is missing, or its
    panic, as at a regular expression without an end, which is no Exception."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


class TokenizersEngine:
    """A `tokenizers.Tokenizer`; `add_special_tokens` runs its post-processor, which puts bos and the like."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, add_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens

    def encode(self, text: str) -> np.ndarray:
        # The batch call of one text skips the character offsets, which nobody reads and which cost a third.
        try:
            encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=self._add_special_tokens)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise DataError(f"the tokenizer cannot encode a text of {len(text)} characters: {error}") from None
        return np.array(encodings[0].ids, dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise DataError(f"the tokenizer cannot decode {len(ids)} ids: {error}") from None

    def token_bytes(self) -> dict[int, bytes] | None:
        to_bytes = _piece_reader(self._tokenizer.decoder)
        if to_bytes is None:
            return None
        added = self._tokenizer.get_added_tokens_decoder()
        plain = {token: piece for piece, token in self._tokenizer.get_vocab(with_added_tokens=False).items()}
        written = {
            token: added_token.content.encode() for token, added_token in added.items() if not added_token.special
        }
        return {token: to_bytes(piece) for token, piece in plain.items() if token not in added} | written


class TiktokenEngine:
    """tiktoken over `ranks` (bytes of a token to its id, whose order is the order of merging).

    `pattern`, of `ENGINE_PATTERNS`, cuts text into the pieces that are merged.
    """

    def __init__(self, ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> None:
        self._ranks = dict(ranks)
        self._special = dict(special)
        self._pattern = pattern
        self._encoding = self._new(pattern, self._special)
        self._allowed = frozenset(special)
        self._probes = common_beginnings(special)

    def encode(self, text: str) -> np.ndarray:
        # The length first: nearly all texts are shorter, and are not searched.
        if len(text) >= LONG_WHITESPACE and re.search(rf"\s{{{LONG_WHITESPACE}}}", text):
            return self._encode_long_whitespace(text)
        # tiktoken copies the set of allowed tokens at each call, so pass it only where it can matter.
        allowed = self._allowed if any(probe in text for probe in self._probes) else _NO_SPECIAL
        # disallowed_special=(): otherwise tiktoken raises for names of special tokens that it may not encode.
        return self._encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=())

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids, errors="replace")

    def token_bytes(self) -> dict[int, bytes]:
        return {token: piece for piece, token in self._ranks.items()}

    def _new(self, pattern: str, special: Mapping[str, int]) -> tiktoken.Encoding:
        import tiktoken

        return tiktoken.Encoding("mt", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens=dict(special))

    def _encode_long_whitespace(self, text: str) -> np.ndarray:
        """The same ids, the text cut into pieces by Oniguruma, whose stack is on the heap."""
        from tokenizers import Regex, pre_tokenizers

        cut = pre_tokenizers.Split(Regex(self._pattern), "isolated")
        # A pattern that takes everything: each piece was cut already and is only merged.
        whole_piece = self._new(r"[\s\S]+", {})
        parts: list[list[int]] = []
        for part in split_at(text, self._special):
            if part in self._special:
                parts.append([self._special[part]])
            else:
                parts.extend(whole_piece.encode_ordinary(piece) for piece, _ in cut.pre_tokenize_str(part))
        return np.array([token for part in parts for token in part], dtype=np.uint32)


def _piece_reader(decoder: tokenizers.decoders.Decoder | None) -> Callable[[str], bytes] | None:
    """How a piece of the vocabulary is read as bytes: GPT-2's alphabet, or SentencePiece's pieces."""
    if decoder is None:
        return None
    # The library shows a decoder's kind in its serialized form (JSON) alone.
    kinds = decoder.__getstate__().decode()
    if '"ByteLevel"' in kinds:
        alphabet = byte_alphabet()

        def to_bytes(piece: str) -> bytes:
            # As the library decodes: a piece with another character than the 256 of bytes stands for its UTF-8.
            known = all(character in alphabet for character in piece)
            return bytes(alphabet[character] for character in piece) if known else piece.encode()

        return to_bytes
    return piece_bytes if SPACE in kinds or '"Metaspace"' in kinds else None


def piece_bytes(piece: str) -> bytes:
    """Bytes of a piece of SentencePiece: `<0x0A>` is a byte, `\u2581` a space."""
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


def common_beginnings(names: Iterable[str], length: int = 3) -> tuple[str, ...]:
    """Few short strings of which a text holds at least one if it holds any of `names`."""
    # `"<|e" in text` costs a fraction of tiktoken's own search for all special tokens.
    return tuple(sorted({name[:length] for name in names}))


def split_at(text: str, names: Iterable[str]) -> list[str]:
    """`text` cut before and after each of `names`, without empty parts; of two at one place the longer wins."""
    longest_first = sorted(names, key=len, reverse=True)
    if not longest_first:
        return [text]
    # The group keeps the names in the result. An alternation takes the first that matches, hence the longest first.
    return [part for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if part]


def prefix_free(names: Iterable[str]) -> bool:
    """Whether no name begins with another one, so that every way of finding them finds the same."""
    ordered = sorted(names)
    # If y begins with x, all names between them in sorted order begin with x too, so neighbours suffice.
    return not any(later.startswith(earlier) for earlier, later in pairwise(ordered))

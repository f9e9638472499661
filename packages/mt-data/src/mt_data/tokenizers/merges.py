"""GPT-2's files, `vocab.json` and `merges.txt`: parsing, and whether they merge by rank alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from mt_core.errors import DataError
from mt_data.tokenizers.base import decode_utf8, parse_json


@dataclass(frozen=True)
class BytePairVocabulary:
    """A byte-level BPE: `vocab` has tokens in GPT-2's alphabet, `merges[k]` is the pair merged k-th."""

    vocab: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """Ids of the 256 bytes and of the results of merges, in the order of merging."""
        to_byte = byte_alphabet()
        names = [*to_byte, *(left + right for left, right in self.merges)]
        return {bytes(map(to_byte.__getitem__, name)): self.vocab[name] for name in names}

    @cached_property
    def merges_by_rank(self) -> bool:
        """Whether "merge the pair whose result has the lowest rank" does exactly what the merges say.

        True of what BPE training makes. False where a merge's part is only made later or never, where two
        merges have one result, or where merges k' < k would cut a token k otherwise than merge k does.
        """
        rank = {name: number - 256 for number, name in enumerate(byte_alphabet())}
        ranks_of_pairs: dict[tuple[str, str], int] = {}
        parts: dict[str, tuple[str, str]] = {}
        for number, pair in enumerate(self.merges):
            result = pair[0] + pair[1]
            if pair[0] not in rank or pair[1] not in rank or result in rank:
                return False
            if _crossed(pair, number, rank, ranks_of_pairs, parts):
                return False
            rank[result] = ranks_of_pairs[pair] = number
            parts[result] = pair
        return True

    @cached_property
    def ids_in_merge_order(self) -> bool:
        """Whether a later merge has a higher id, so that ids can serve as ranks."""
        ids = list(self.ids_by_bytes.values())[256:]
        return all(earlier < later for earlier, later in pairwise(ids))


def _crossed(
    pair: tuple[str, str],
    number: int,
    rank: Mapping[str, int],
    ranks_of_pairs: Mapping[tuple[str, str], int],
    parts: Mapping[str, tuple[str, str]],
) -> bool:
    """Whether some merge before `number` joins tokens across the boundary of `pair`.

    Walks back in time through the tokens that touch the boundary. Each pair of neighbours existed until
    the first of them was merged on its own side; a merge across of lower rank would have come before. At
    equal rank the left side's merge comes first and the right side's after, since merging goes left to right.
    """
    left, right = pair
    left_until = right_until = number
    left_rank, right_rank = rank[left], rank[right]
    while True:
        across = ranks_of_pairs.get((left, right))
        if across is not None and across < left_until and across <= right_until:
            return True
        if left_rank < 0 and right_rank < 0:
            return False
        if left_rank > right_rank:
            left_until, left = left_rank, parts[left][1]
            left_rank = rank[left]
        else:
            right_until, right = right_rank, parts[right][0]
            right_rank = rank[right]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where Latin-1 prints it, else the next free one from U+0100.

    Ordered by byte, so that the k-th name is byte k.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {names[byte]: byte for byte in range(256)}


def parse_vocab_and_merges(vocab: bytes, merges: bytes, vocab_path: str, merge_path: str) -> BytePairVocabulary:
    """Both files, checked against each other; DataError names the file, the line and the token."""
    ids = _parse_vocab(vocab, vocab_path)
    missing = [f"0x{byte:02x}" for name, byte in byte_alphabet().items() if name not in ids]
    if missing:
        raise DataError(
            f"tokenizer.vocab_file={vocab_path!r} lacks the tokens of {len(missing)} of the 256 bytes "
            f"({', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}), so some texts could not be "
            "written; a byte-level vocabulary has all of them"
        )
    pairs = _parse_merges(merges, merge_path, ids, vocab_path)
    return BytePairVocabulary(ids, tuple(pairs))


def _parse_vocab(data: bytes, path: str) -> dict[str, int]:
    value = parse_json(data, path, "vocab_file")
    if not isinstance(value, dict):
        raise DataError(
            f"tokenizer.vocab_file={path!r} holds a JSON {type(value).__name__}; GPT-2's holds an object from "
            "tokens to ids"
        )
    owner: dict[int, str] = {}
    for name, token in value.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise DataError(f"tokenizer.vocab_file={path!r}: the id of {name!r} is {token!r}, not a number from 0")
        if token in owner:
            raise DataError(f"tokenizer.vocab_file={path!r} gives the id {token} to {owner[token]!r} and {name!r}")
        owner[token] = name
    return value


def _parse_merges(data: bytes, path: str, vocab: Mapping[str, int], vocab_path: str) -> list[tuple[str, str]]:
    lines: dict[tuple[str, str], int] = {}
    for number, line in enumerate(decode_utf8(data, path, "merge_file").split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        pair = (left, right)
        if not left or not right or " " in right:
            raise DataError(f"{_line(path, number)}: {line!r} is not two tokens with one space between")
        if left not in vocab or right not in vocab or left + right not in vocab:
            name = next(name for name in (left, right, left + right) if name not in vocab)
            raise DataError(
                f"{_line(path, number)}: {line!r} needs the token {name!r}, which tokenizer.vocab_file={vocab_path!r} "
                "does not have; the two files must come from one tokenizer"
            )
        if pair in lines:
            raise DataError(f"{_line(path, number)}: {line!r} stands already in line {lines[pair]}")
        lines[pair] = number
    return list(lines)


def _line(path: str, number: int) -> str:
    return f"tokenizer.merge_file={path!r} line {number}"

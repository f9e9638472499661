"""GPT-2's files, `vocab.json` and `merges.txt`: parsing, and whether they merge by rank alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from mt_core.errors import DataError
from mt_data.tokenizers.base import decode_utf8, parse_json


@dataclass(frozen=True)
class BytePairVocabulary:
    """A byte-level BPE: `vocab` has tokens in GPT-2's alphabet, `merges[k]` is the pair merged k-th."""

    vocab: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]

    @cached_property
    def _names(self) -> list[str]:
        """The 256 bytes, then the result of each merge."""
        return [*byte_alphabet(), *map("".join, self.merges)]

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """Ids of the 256 bytes and of the results of merges, in the order of merging."""
        table = {ord(name): byte for name, byte in byte_alphabet().items()}
        # All names at once: translate maps GPT-2's alphabet to U+0000 to U+00FF, which latin-1 writes as one byte each.
        # One call in place of 50,000.
        whole = "".join(self._names).translate(table).encode("latin-1")
        ends = list(accumulate(map(len, self._names)))
        return {
            whole[begin:end]: self.vocab[name] for begin, end, name in zip([0, *ends], ends, self._names, strict=False)
        }

    @cached_property
    def merges_by_rank(self) -> bool:
        """Whether "merge the pair whose result has the lowest rank" does exactly what the merges say.

        True of what BPE training makes. False where a merge's part is only made later or never, where two
        merges have one result, or where merges k' < k would cut a token k otherwise than merge k does.
        """
        # Numbers in the order of making: 0 to 255 the bytes, 256 + k the result of merge k.
        numbers = {name: number for number, name in enumerate(self._names)}
        if len(numbers) < len(self._names) or not all(part in numbers for pair in self.merges for part in pair):
            return False
        flat = [numbers[part] for pair in self.merges for part in pair]
        parts = np.array(flat, np.int64).reshape(-1, 2)
        merged = 256 + np.arange(len(parts))
        # Parts must exist before they are merged; then no earlier merge may join across the boundary of a later one.
        return bool((parts < merged[:, None]).all()) and not _any_crossed(parts[:, 0], parts[:, 1], merged)

    @cached_property
    def ids_in_merge_order(self) -> bool:
        """Whether a later merge has a higher id, so that ids can serve as ranks."""
        ids = list(self.ids_by_bytes.values())[256:]
        return all(earlier < later for earlier, later in pairwise(ids))


def _any_crossed(left: np.ndarray, right: np.ndarray, merged: np.ndarray) -> bool:
    """Whether for some pair an earlier merge joins tokens across its boundary.

    left, right, made [merges]: the parts and the result of each merge, as numbers of tokens (bytes are below 256).
    Walks back in time through the tokens that touch each boundary. Two neighbours existed until the first of them was
    merged on its own side; a merge across of lower rank would have come before. At equal rank the left side's
    merge comes first and the right side's after, since merging goes left to right.
    """
    find = _finder(left, right)
    # The parts of each token by its number, int64 [256 + merges]; a byte stands for itself and is never cut.
    first, second = (np.concatenate((np.arange(256), part)) for part in (left, right))
    # Until which merge the tokens on both sides of the boundary exist: at first until the merge under examination.
    left_until = right_until = merged
    while len(left):
        across = find(left, right)
        if ((across < left_until) & (across <= right_until)).any():
            return True
        # Two bytes have no parts: their boundary is settled.
        rest = np.maximum(left, right) >= 256
        left, right, left_until, right_until = left[rest], right[rest], left_until[rest], right_until[rest]
        cut = left > right  # the younger one is cut into its parts
        left_until, right_until = np.where(cut, left, left_until), np.where(cut, right_until, right)
        # The part that touches the boundary is the right one of the left token, the left one of the right token.
        left = np.where(cut, second[left], left)
        right = np.where(cut, right, first[right])
    return False


def _finder(left: np.ndarray, right: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Pairs of tokens -> the result of their merge, or a number above all tokens."""
    size = 256 + len(left)
    # A pair as one number below 2^63, so that pairs are found by bisection in an array.
    keys = left * size + right
    order = np.argsort(keys)
    ordered = keys[order]

    def find(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wanted = a * size + b
        place = np.searchsorted(ordered, wanted).clip(max=len(keys) - 1)
        # `size` is above every number of a token: a pair that is never merged crosses nothing.
        return np.where(ordered[place] == wanted, 256 + order[place], size)

    return find


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

"""Base of the tokenizers: the class, reading files, fingerprints, rebuilding, padding, special tokens."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from mt_core.config.schema import TokenizerConfig
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SpecialTokens

ConfigT = TypeVar("ConfigT", bound=TokenizerConfig)


class FileTokenizerConfig(TokenizerConfig):
    """A tokenizer that reads files; `file_keys` says which keys hold their paths."""

    file_keys: ClassVar[Mapping[str, str]] = {}
    """Key of this section to the name under which the file is stored; "." is a directory of files."""


class BaseTokenizer(ABC):
    """Implements `mt_core.interfaces.Tokenizer`; a subclass gives `_encode` and `_decode`.

    `options` are the configuration values that change the ids; together with the files' contents they
    make the fingerprint. Objects are immutable, and safe to use from several threads.
    """

    def __init__(
        self, *, vocab_size: int, special: SpecialTokens, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> None:
        self._vocab_size = vocab_size
        self._special = special
        self._files = dict(files)
        self._options = dict(options)
        self._fingerprint = fingerprint(options, files)

    @property
    def vocab_size(self) -> int:
        """The true number of ids, special ones included, without any padding."""
        return self._vocab_size

    @property
    def special(self) -> SpecialTokens:
        return self._special

    @abstractmethod
    def _encode(self, text: str) -> np.ndarray:
        """Ids of `text`; may raise whatever its library raises for a lone surrogate."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Text of ids that are all within the vocabulary."""

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of `text`: [tokens], uint16, int32 or uint32, possibly read-only.

        Raises DataError when `text` holds a surrogate, which no encoding of Unicode can write.
        """
        try:
            # Surrogates are looked for only after a failure: a search of every text would cost as much as some
            # tokenizers do.
            return self._encode(text)
        except (UnicodeEncodeError, TypeError, RuntimeError):
            _refuse_surrogates(text)
            raise

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD, special ids their names where they have one.

        Raises DataError for an id past the vocabulary.
        """
        plain = [int(token) for token in ids]
        for token in plain:
            if not 0 <= token < self._vocab_size:
                raise DataError(f"id {token} is not one of this tokenizer's 0 to {self._vocab_size - 1}")
        return self._decode(plain)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as Python integers; `encode_array` is the quicker way to the same ids."""
        return self.encode_array(text).tolist()

    def token_bytes(self) -> list[bytes | None] | None:
        """See `mt_core.interfaces.HasTokenBytes`."""
        pieces = self._token_bytes()
        return None if pieces is None else [pieces.get(token) for token in range(self._vocab_size)]

    def _token_bytes(self) -> Mapping[int, bytes] | None:
        """Bytes of the ids that stand for some; None where these depend on neighbours."""
        return None

    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) of the options and the files' contents; where the files lie does not count."""
        return self._fingerprint

    def is_extension_of(self, recorded: str) -> bool:
        """Whether `recorded` is the fingerprint of this tokenizer with fewer tokens added behind its vocabulary, whose
        ids all mean the same here: T5's sentinels are added in training, and not where texts are preprocessed."""
        added = self._options.get("added", [])
        return any(
            recorded == fingerprint({**self._options, "added": added[:count]}, self._files)
            for count in range(len(added))
        )

    def files(self) -> Mapping[str, bytes]:
        """The files' contents as they were read, by the names that `materialize` writes them under."""
        return self._files


def fingerprint(options: Mapping[str, Any], files: Mapping[str, bytes]) -> str:
    """SHA-256 over canonical JSON of `options` and of each file's name and SHA-256."""
    content = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    text = json.dumps({"options": dict(options), "files": content}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def materialize(config: ConfigT, files: Mapping[str, bytes], directory: Path) -> ConfigT:
    """Write a tokenizer's `files()` into `directory` and return `config` with its paths pointing there.

    The tokenizer built from the returned configuration has the same fingerprint. Raises DataError when a
    file that the configuration needs is not among `files`, or when a name would leave the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        # Names may come from a checkpoint that somebody else wrote; "../x" must not leave the directory.
        if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).name:
            raise DataError(f"a tokenizer's file is named {name!r}; it must be a plain file name or below a folder")
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    paths = {}
    for key, name in getattr(config, "file_keys", {}).items():
        if getattr(config, key) is None:
            continue
        if name != "." and name not in files:
            raise DataError(f"tokenizer.{key} needs the file {name!r}, which is not among {sorted(files)}")
        paths[key] = str(directory / name) if name != "." else str(directory)
    return config.model_copy(update=paths)


def read_file(path: str | None, key: str) -> bytes:
    """Content of the file that `tokenizer.<key>` names; ConfigError when unset, DataError when unreadable."""
    if path is None:
        raise ConfigError(f"tokenizer.{key} is not set; give the path of the file")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"tokenizer.{key}={path!r} cannot be read: {reason}") from error
    if not data:
        raise DataError(f"tokenizer.{key}={path!r} is empty")
    return data


def decode_utf8(data: bytes, path: str | None, key: str) -> str:
    """Text of a file; DataError with the line of the first byte that is no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"tokenizer.{key}={path!r} line {line}: byte 0x{data[error.start]:02x} is no UTF-8 "
            f"({error.reason}); the file must be UTF-8 text"
        ) from error


def parse_json(data: bytes, path: str | None, key: str) -> Any:
    """JSON value of a file; DataError with line and column of what is wrong."""
    try:
        return json.loads(decode_utf8(data, path, key), object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise DataError(
            f"tokenizer.{key}={path!r} line {error.lineno}, column {error.colno}: not JSON ({error.msg})"
        ) from error
    except _DuplicateKeyError as error:
        raise DataError(f"tokenizer.{key}={path!r} has the key {error.args[0]!r} twice") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"tokenizer.{key}={path!r} cannot be read: {error}") from error


class _DuplicateKeyError(ValueError):
    """A JSON object with one key twice, of which Python's reader would keep the last without a word."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # The lengths differ only if a key stands twice; the slow search for it runs in that case alone.
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _DuplicateKeyError(name)
            seen.add(name)
    return result


def _refuse_surrogates(text: str) -> None:
    """DataError when `text` has a lone surrogate (JSON's `"\\ud800"` makes one), else nothing."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
            "which is no Unicode text; repair the document or leave it out"
        ) from error


# -- special tokens: which are added after the vocabulary, and which id has which meaning ------------

Lookup = Callable[[str], int | None]
"""The id of a token by its text, or None."""

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
BEGINNING_OF_TEXT = ("<|begin_of_text|>", "<s>")


def sentinel_names(count: int) -> list[str]:
    """T5's span markers in the order of their use: `<extra_id_0>`, `<extra_id_1>`, ..."""
    return [f"<extra_id_{number}>" for number in range(count)]


def sentinel_ids(count: int, lookup: Lookup) -> tuple[int, ...]:
    """Ids of the first `count` sentinels; those that `lookup` does not know are left out."""
    ids = (lookup(name) for name in sentinel_names(count))
    return tuple(token for token in ids if token is not None)


def added_names(special_tokens: Sequence[str] | None, vocab_extra_ids: int) -> list[str]:
    """Names to be found in the vocabulary or added after it, in that order, each once."""
    names = [*(special_tokens or ()), *sentinel_names(vocab_extra_ids)]
    for name in names:
        if not name:
            raise ConfigError("tokenizer.tokenizer_special_tokens holds an empty string; remove it")
    return list(dict.fromkeys(names))


def assign_ids(names: Iterable[str], lookup: Lookup, first_free: int) -> dict[str, int]:
    """The id of each name: the vocabulary's own where it has the token, else the next free one."""
    ids: dict[str, int] = {}
    for name in names:
        known = lookup(name)
        ids[name] = first_free if known is None else known
        # Only names that the vocabulary lacks take an id.
        first_free += known is None
    return ids


def first_known(names: Iterable[str], lookup: Lookup) -> int | None:
    """The id of the first of `names` that exists."""
    return next((token for name in names if (token := lookup(name)) is not None), None)


def by_common_names(lookup: Lookup, vocab_extra_ids: int) -> SpecialTokens:
    """Meanings by the names that tiktoken and Llama vocabularies use; eod is eos."""
    eos = first_known(END_OF_DOCUMENT, lookup)
    return SpecialTokens(
        eod=eos,
        bos=first_known(BEGINNING_OF_TEXT, lookup),
        eos=eos,
        pad=first_known(("<pad>", "<|pad|>"), lookup),
        mask=lookup("<mask>"),
        cls=lookup("<cls>"),
        sep=lookup("<sep>"),
        sentinels=sentinel_ids(vocab_extra_ids, lookup),
    )

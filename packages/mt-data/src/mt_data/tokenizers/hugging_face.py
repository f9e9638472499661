"""Any tokenizer of a directory with `tokenizer.json`, through the `tokenizers` library and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import NonNegativeInt

from mt_core.errors import DataError
from mt_core.interfaces import SpecialTokens
from mt_data.tokenizers import base as names
from mt_data.tokenizers.base import BaseTokenizer, FileTokenizerConfig, decode_utf8, parse_json, read_file
from mt_data.tokenizers.engines import TokenizersEngine
from mt_data.tokenizers.limits import LARGEST_ID, require_file_size, require_limits, require_size
from mt_data.tokenizers.regex_probes import endless_pattern

if TYPE_CHECKING:
    import tokenizers

KEY = "tokenizer_model"
MAIN_FILE = "tokenizer.json"
OPTIONAL_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
INSTEAD = {
    "vocab.json": "GPT2BPETokenizer with vocab_file and merge_file",
    "vocab.txt": "BertWordPieceLowerCase or BertWordPieceCase with vocab_file",
    "tokenizer.model": "Llama2Tokenizer with tokenizer_model (SentencePiece)",
    "spiece.model": "SentencePieceTokenizer with tokenizer_model",
}
"""What to use for a directory without `tokenizer.json` that has this file."""


class HuggingFaceConfig(FileTokenizerConfig):
    """A tokenizer saved by `save_pretrained`. Nothing is downloaded and no code of the directory is run."""

    file_keys: ClassVar[Mapping[str, str]] = {KEY: "."}

    tokenizer_type: str = "HuggingFaceTokenizer"
    tokenizer_model: str
    """A local directory with `tokenizer.json`, and `tokenizer_config.json` for the special tokens."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out what the tokenizer puts around a text by itself, such as bos for Llama or [CLS] for BERT."""
    tokenizer_special_tokens: list[str] | None = None
    """Further tokens that are found in the text as they stand; those that the vocabulary lacks are added."""
    vocab_extra_ids: NonNegativeInt = 0
    """Number of T5 sentinels, `<extra_id_0>` and on; those that the vocabulary lacks are added."""


class HuggingFaceTokenizer(BaseTokenizer):
    """Ids as `transformers` gives them. eod is eos, which is sep where there is no eos; bos likewise from cls."""

    def __init__(self, config: HuggingFaceConfig) -> None:
        directory = Path(config.tokenizer_model)
        files = read_directory(directory)
        settings = _settings(files, directory)
        tokenizer = _load(files[MAIN_FILE], directory)
        added = names.added_names(config.tokenizer_special_tokens, config.vocab_extra_ids)
        _add_declared_tokens(tokenizer, settings, directory)
        # Tokens that the vocabulary has keep their ids, and are from now on found in the text before it is cut.
        tokenizer.add_special_tokens([*_role_tokens(settings).values(), *added])
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        super().__init__(
            # Not the number of tokens: vocabularies may leave ids out, and embeddings are indexed by id.
            vocab_size=max(ids) + 1,
            special=_special(settings, tokenizer, config.vocab_extra_ids),
            files=files,
            options={
                "type": "HuggingFaceTokenizer",
                "added": added,
                "include_special_tokens": not config.tokenizer_hf_no_include_special_tokens,
            },
        )
        self.chat_template = _chat_template(files, settings, directory)
        """Jinja text that turns messages into a prompt, or None. Rendering it is the caller's business."""
        self._engine = TokenizersEngine(tokenizer, not config.tokenizer_hf_no_include_special_tokens)

    def _encode(self, text: str) -> np.ndarray:
        return self._engine.encode(text)

    def _decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids)

    def _token_bytes(self) -> dict[int, bytes] | None:
        return self._engine.token_bytes()


def read_directory(directory: Path) -> dict[str, bytes]:
    """The directory's tokenizer files by name; DataError that says what to use when `tokenizer.json` is missing."""
    if not directory.is_dir():
        raise DataError(
            f"tokenizer.{KEY}={str(directory)!r} is no directory; give a local one that holds {MAIN_FILE} (models "
            "are not downloaded by name)"
        )
    if not (directory / MAIN_FILE).is_file():
        alternative = next((name for name in INSTEAD if (directory / name).is_file()), None)
        hint = f"; it has {alternative}: use tokenizer_type {INSTEAD[alternative]}" if alternative else ""
        raise DataError(f"tokenizer.{KEY}={str(directory)!r} holds no {MAIN_FILE}{hint}")
    present = [name for name in OPTIONAL_FILES if (directory / name).is_file()]
    for name in (MAIN_FILE, *present):
        require_file_size(directory / name, KEY)
    return {name: read_file(str(directory / name), KEY) for name in (MAIN_FILE, *present)}


def _load(data: bytes, directory: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    path = str(directory / MAIN_FILE)
    text = decode_utf8(data, path, KEY)
    _require_harmless(data, path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises a bare Exception for a file that it cannot use
        raise DataError(f"tokenizer.{KEY}={path!r} is no tokenizer of the `tokenizers` library: {error}") from error
    # tokenizer.json can prescribe both; a corpus must be encoded whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _require_harmless(data: bytes, path: str) -> None:
    require_size(data, path, KEY)
    content = parse_json(data, path, KEY)
    require_limits(content, path, KEY)
    if isinstance(content, Mapping) and (endless := endless_pattern(content)) is not None:
        part, pattern = endless
        raise DataError(
            f"tokenizer.{KEY}={path!r} is refused: its {part} has the regular expression {pattern[:80]!r}, which "
            "does not end on a text of 41 characters; write it without a repeated group of repetitions"
        )


def _settings(files: Mapping[str, bytes], directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with the special tokens of `special_tokens_map.json` where it names none."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in files:
            require_size(files[name], str(directory / name), KEY)
            value = parse_json(files[name], str(directory / name), KEY)
            if not isinstance(value, dict):
                raise DataError(f"tokenizer.{KEY}: {str(directory / name)!r} holds no JSON object")
            merged |= {key: setting for key, setting in value.items() if setting is not None}
    return merged


def _content(token: Any) -> str | None:
    """A special token's text, which the files write as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _role_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {role: _content(settings.get(role)) for role in ROLES}
    return {role: token for role, token in tokens.items() if token}


def _add_declared_tokens(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], directory: Path) -> None:
    """Tokens of `added_tokens_decoder` that `tokenizer.json` lacks; each must get the id that is written there."""
    from tokenizers import AddedToken

    # By number and not by text, since the library gives the next free id to each.
    for token, entry in sorted(_declared_tokens(settings, directory).items()):
        name = _content(entry)
        if name is None or tokenizer.token_to_id(name) == token:
            continue
        flags = {flag: bool(entry[flag]) for flag in ADDED_TOKEN_FLAGS if flag in entry}
        tokenizer.add_tokens([AddedToken(name, **flags)])
        if tokenizer.token_to_id(name) != token:
            raise DataError(
                f"tokenizer.{KEY}={str(directory)!r}: tokenizer_config.json says that {name!r} has the id {token}, "
                f"with {MAIN_FILE} it is {tokenizer.token_to_id(name)}; the two files do not belong together"
            )


def _declared_tokens(settings: Mapping[str, Any], directory: Path) -> dict[int, dict[str, Any]]:
    """`added_tokens_decoder` by id. Raises DataError for what is no object of objects by id."""
    declared = settings.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict) or not all(
        token.isascii() and token.isdigit() and len(token) <= len(str(LARGEST_ID)) and isinstance(entry, dict)
        for token, entry in declared.items()
    ):
        raise DataError(
            f"tokenizer.{KEY}={str(directory)!r}: added_tokens_decoder of tokenizer_config.json must hold an object "
            'for each id, such as {"0": {"content": "<s>"}}'
        )
    return {int(token): entry for token, entry in declared.items()}


def _special(settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, vocab_extra_ids: int) -> SpecialTokens:
    role = {name: tokenizer.token_to_id(token) for name, token in _role_tokens(settings).items()}
    eos = role.get("eos_token", role.get("sep_token"))
    return SpecialTokens(
        eod=eos,
        bos=role.get("bos_token", role.get("cls_token")),
        eos=eos,
        pad=role.get("pad_token"),
        mask=role.get("mask_token"),
        cls=role.get("cls_token"),
        sep=role.get("sep_token"),
        sentinels=names.sentinel_ids(vocab_extra_ids, tokenizer.token_to_id),
    )


def _chat_template(files: Mapping[str, bytes], settings: Mapping[str, Any], directory: Path) -> str | None:
    name = "chat_template.jinja"
    if name in files:
        return decode_utf8(files[name], str(directory / name), KEY)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name; the one without purpose of its own is called default
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def build_hugging_face(config: HuggingFaceConfig) -> HuggingFaceTokenizer:
    """Read the directory; raises DataError for files that are missing, damaged or at odds."""
    return HuggingFaceTokenizer(config)

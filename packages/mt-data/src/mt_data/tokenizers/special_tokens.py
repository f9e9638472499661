"""Special tokens by name: which are added after the vocabulary, and which id has which meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mt_core.errors import ConfigError
from mt_core.specs import SpecialTokens

Lookup = Callable[[str], int | None]
"""The id of a token by its text, or None."""

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
BEGINNING_OF_TEXT = ("<|begin_of_text|>", "<s>")


def sentinel_names(count: int) -> list[str]:
    """T5's span markers in the order of their use: `<extra_id_0>`, `<extra_id_1>`, ..."""
    return [f"<extra_id_{number}>" for number in range(count)]


def sentinel_ids(count: int, lookup: Lookup) -> tuple[int, ...]:
    """Ids of the first `count` sentinels; those that `lookup` does not know are left out."""
    found = (lookup(name) for name in sentinel_names(count))
    return tuple(token for token in found if token is not None)


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

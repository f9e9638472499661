"""The tokenizer of a GGUF file, as the files that stand beside a model of Hugging Face.

The file holds a vocabulary, merges, special tokens and a chat template. The way to split text before merging is known
to llama.cpp by a name (`tokenizer.ggml.pre`); it is written out here for the names in SPLITTINGS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_ckpt.gguf.metadata import list_of, value_of
from mt_ckpt.hugging_face.tokenizer import CHAT_TEMPLATE, GENERATION, MORE_TEMPLATES, generation_defaults
from mt_core.errors import CheckpointError

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: tokens that no merge makes."""
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""`<role>_token` there -> `tokenizer.ggml.<name>_token_id`."""
FURTHER_ENDS = ("eot", "eom")
"""Names of further ends, of a turn and of a message: llama.cpp stops at each of them as at eos."""

BYTES: Mapping[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2: Mapping[str, Any] = {**BYTES, "use_regex": True}
"""Bytes as characters, behind GPT-2's regular expression."""
SINGLE_DIGITS: Mapping[str, Any] = {"type": "Digits", "individual_digits": True}


def _by_pattern(digits: str) -> Sequence[Mapping[str, Any]]:
    """Tiktoken's cl100k pattern; digits: how many stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return _split(pattern)


UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Tiktoken's o200k pattern, of GPT-4o and GPT-OSS."""


def _split(pattern: str) -> Sequence[Mapping[str, Any]]:
    return ({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, BYTES)


@dataclass(frozen=True)
class Splitting:
    """What comes before merging. steps: pre-tokenizers of the `tokenizers` library, in their order.

    whole_words: a piece of text that is a token is taken without merging. adds_bos: unless the file says it.
    """

    steps: Sequence[Mapping[str, Any]]
    normalizer: Mapping[str, Any] | None = None
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = Splitting((GPT2,))
_STARCODER = Splitting((SINGLE_DIGITS, GPT2))
SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "llama-bpe": Splitting(_by_pattern(r"\p{N}{1,3}"), whole_words=True, adds_bos=True),
    "gpt-4o": Splitting(_split(O200K)),
    "qwen2": Splitting(_by_pattern(r"\p{N}"), normalizer={"type": "NFC"}),
}
"""`tokenizer.ggml.pre` -> what it means, of byte-level vocabularies."""


def tokenizer_files(values: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json and chat templates from a file's metadata.

    generation_config.json alone, if the file names special tokens, without a vocabulary, for one that is none of BPE
    over bytes, and for a way of splitting text that is not known here. vocab_size: of the model. Raises CheckpointError
    for values of other types than the format's.
    """
    tokens = list_of(values, "tokenizer.ggml.tokens", str)
    content = _contents(values, tokens) if tokens else None
    size = len(tokens) or vocab_size or 0
    roles = _role_ids(values, size)
    generation = _defaults_of_generation(roles, _further_ends(values, size))
    if content is None:
        return generation
    template, further = value_of(values, "tokenizer.chat_template", str), _further_templates(values)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": tokens[number] for role, number in roles.items()},
        "chat_template": template,
    }
    # Where other templates are files, transformers does not read the one among the settings.
    files = {CHAT_TEMPLATE: template.encode(errors="surrogatepass")} if further and template else {}
    return {
        **files,
        **further,
        "tokenizer.json": _json(content),
        "tokenizer_config.json": _json({key: value for key, value in settings.items() if value is not None}),
        **generation,
    }


def _further_templates(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Files of the templates beside the default one; a file of GGUF has each under its name."""
    prefix = "tokenizer.chat_template."
    names = [key.removeprefix(prefix) for key in values if key.startswith(prefix)]
    if unsafe := [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]:
        raise CheckpointError(f"the chat template's name {unsafe[0]!r} is not that of a file")
    templates = {name: value_of(values, prefix + name, str) or "" for name in names}
    return {f"{MORE_TEMPLATES}/{name}.jinja": text.encode(errors="surrogatepass") for name, text in templates.items()}


def _role_ids(values: Mapping[str, Any], size: int) -> dict[str, int]:
    ids = {role: value_of(values, f"tokenizer.ggml.{name}_token_id", int) for role, name in ROLES.items()}
    # An id beyond the vocabulary names no token.
    return {role: number for role, number in ids.items() if number is not None and 0 <= number < size}


def _further_ends(values: Mapping[str, Any], size: int) -> list[int]:
    ids = [value_of(values, f"tokenizer.ggml.{name}_token_id", int) for name in FURTHER_ENDS]
    return [number for number in ids if number is not None and 0 <= number < size]


def _defaults_of_generation(roles: Mapping[str, int], further: Sequence[int]) -> dict[str, bytes]:
    """further: ends beside eos."""
    ids: dict[str, Any] = {f"{role}_token_id": number for role, number in roles.items() if role != "unk"}
    ends = list(dict.fromkeys([*([roles["eos"]] if "eos" in roles else []), *further]))
    if further:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {GENERATION: generation_defaults(ids)} if ids else {}


def _contents(values: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """tokenizer.json of a vocabulary that is BPE over bytes ("gpt2") or has scores ("llama"); None for others."""
    kind = values.get("tokenizer.ggml.model")
    if kind == "llama":
        return _scored(values, tokens)
    merges = list_of(values, "tokenizer.ggml.merges", str)
    splitting = SPLITTINGS.get(value_of(values, "tokenizer.ggml.pre", str) or "gpt-2")
    if kind != "gpt2" or splitting is None or not merges:
        return None
    steps = {
        "normalizer": splitting.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(splitting.steps)},
        "decoder": BYTES,
    }
    model = {
        "type": "BPE",
        "ignore_merges": splitting.whole_words,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
    }
    return _tokenizer(values, tokens, steps, model, adds_bos=splitting.adds_bos, otherwise=BYTES)


def _scored(values: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    prefix = value_of(values, "tokenizer.ggml.add_space_prefix", bool)
    scores = list_of(values, "tokenizer.ggml.scores", float)
    model = scored_model(tokens, scores, list_of(values, "tokenizer.ggml.token_type", int))
    return _tokenizer(values, tokens, scored_steps(prefix is not False), model, adds_bos=True, otherwise=None)


def _tokenizer(
    values: Mapping[str, Any],
    tokens: list[str],
    steps: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    adds_bos: bool,
    otherwise: Any,
) -> dict[str, Any]:
    """The contents of tokenizer.json. adds_bos: unless the file says it. otherwise: the post-processor without one."""
    said, roles = value_of(values, "tokenizer.ggml.add_bos_token", bool), _role_ids(values, len(tokens))
    bos = roles.get("bos") if (adds_bos if said is None else said) else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(list_of(values, "tokenizer.ggml.token_type", int), tokens, roles),
        **steps,
        "post_processor": otherwise if bos is None else _puts_in_front(tokens[bos], bos),
        "model": model,
    }


def _added_tokens(kinds: Sequence[int], tokens: list[str], roles: Mapping[str, int]) -> list[dict[str, Any]]:
    """Control tokens, which are special, and those that a user defined; the roles where the file has no kinds."""
    if kinds and len(kinds) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    special = {number for number, kind in enumerate(kinds) if kind == CONTROL} | set(roles.values())
    added = special | {number for number, kind in enumerate(kinds) if kind == USER_DEFINED}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": n, "content": tokens[n], **plain, "special": n in special} for n in sorted(added)]


def _puts_in_front(token: str, number: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, pair = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, pair],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False) + "\n").encode(errors="surrogatepass")


SPACE = "\u2581"
NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6


def scored_model(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> dict[str, Any]:
    """The key `model`. Raises CheckpointError for lists of different lengths."""
    if len(scores) != len(tokens) or len(kinds) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, scores {len(scores)} and token_type {len(kinds)}"
        )
    vocabulary = {token: number for number, token in reversed(list(enumerate(tokens)))}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    ranked = sorted(_pairs(tokens, kinds, vocabulary), key=lambda pair: -scores[pair[0]])
    return {
        "type": "BPE",
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": BYTE in kinds,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [[first, second] for _, first, second in ranked],
    }


def _pairs(
    tokens: Sequence[str], kinds: Sequence[int], vocabulary: Mapping[str, int]
) -> Iterator[tuple[int, str, str]]:
    """(token, its two parts), of all ways to make a token of two others."""
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != NORMAL:
            continue
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in parts if pair[0] in vocabulary and pair[1] in vocabulary]
        for first, second in sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]])):
            yield number, first, second


def scored_steps(adds_prefix: bool) -> dict[str, Any]:
    """The keys `normalizer`, `pre_tokenizer` and `decoder`: spaces are tokens' characters, with one in front."""
    prepend = [{"type": "Prepend", "prepend": SPACE}] if adds_prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }

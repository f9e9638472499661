"""A tokenizer's files as metadata of a GGUF file: vocabulary, merges or scores, special tokens, chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mt_ckpt.gguf.sentencepiece_model import BPE, parse
from mt_ckpt.gguf.tokenizer import CONTROL, FURTHER_ENDS, ROLES, SPLITTINGS, USER_DEFINED
from mt_ckpt.hugging_face.tokenizer import CHAT_TEMPLATE, GENERATION, MORE_TEMPLATES
from mt_core.errors import CheckpointError
from mt_core.specs import TRAINED_TEMPLATE

NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6
SPACE = "\u2581"
EOS = "tokenizer.ggml.eos_token_id"


def tokenizer_metadata(files: Mapping[str, bytes], vocab_size: int) -> dict[str, Any]:
    """Keys under `tokenizer.`. vocab_size: of the model, which may have rows for more ids than the tokenizer.

    Without a tokenizer that llama.cpp has: none, so that the file holds a model of ids, and the ids of the defaults of
    generation.
    """
    content, settings = _json(files, "tokenizer.json"), _json(files, "tokenizer_config.json")
    values = _vocabulary(content, files, vocab_size)
    if values is None:
        ids = _ids({}, _json(files, GENERATION), vocab_size)
        return {"tokenizer.ggml.model": "none", **ids, "tokenizer.ggml.add_bos_token": False}
    tokens = values["tokenizer.ggml.tokens"]
    return {**values, **_roles(settings, files, tokens), **_adds(content, settings), **_templates(files, settings)}


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}


# -- vocabulary --------------------------------------------------------------------------------------


def _vocabulary(content: Mapping[str, Any], files: Mapping[str, bytes], vocab_size: int) -> dict[str, Any] | None:
    if "tokenizer.model" in files and (vocabulary := _sentencepiece(files["tokenizer.model"], content, vocab_size)):
        return vocabulary
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        return None
    if model.get("byte_fallback"):
        return _scored(content, vocab_size)
    name = splitting_name(content)
    return None if name is None else _byte_level(content, name, vocab_size)


def splitting_name(content: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of how text is split before merging; None for a way that is not known here."""
    first = content.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers") if first.get("type") == "Sequence" else [first]
    steps = [_without_defaults(step) for step in steps or []]
    normalizer, whole = content.get("normalizer"), bool(content["model"].get("ignore_merges"))
    for name, splitting in SPLITTINGS.items():
        known = [_without_defaults(step) for step in splitting.steps]
        if (known, splitting.normalizer, splitting.whole_words) == (steps, normalizer, whole):
            return name
    return None


def _without_defaults(step: Mapping[str, Any]) -> dict[str, Any]:
    # Offsets are not ids.
    return {key: value for key, value in step.items() if key != "trim_offsets" and (key, value) != ("invert", False)}


def _byte_level(content: Mapping[str, Any], name: str, vocab_size: int) -> dict[str, Any]:
    tokens, kinds = _tokens_and_kinds(content["model"]["vocab"], content, vocab_size)
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"].get("merges", [])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }


def _tokens_and_kinds(
    vocabulary: Mapping[str, int], content: Mapping[str, Any], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Ids that no token has, of a model with more rows, are named and unused."""
    added = {entry["id"]: entry for entry in content.get("added_tokens") or []}
    size = max(vocab_size, 1 + max([*vocabulary.values(), *added]))
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [UNUSED] * size
    for token, number in vocabulary.items():
        tokens[number], kinds[number] = token, NORMAL
    for number, entry in added.items():
        tokens[number], kinds[number] = entry["content"], CONTROL if entry.get("special") else USER_DEFINED
    return tokens, kinds


# -- vocabularies with scores (SentencePiece) ----------------------------------------------------------


def _sentencepiece(data: bytes, content: Mapping[str, Any], vocab_size: int) -> dict[str, Any] | None:
    model = parse(data)
    if model.model_type != BPE:
        return None
    vocabulary = {piece.text: number for number, piece in enumerate(model.pieces)}
    tokens, kinds = _tokens_and_kinds(vocabulary, content, vocab_size)
    for number, piece in enumerate(model.pieces):
        tokens[number], kinds[number] = piece.text, piece.kind
    scores = [piece.score for piece in model.pieces] + [0.0] * (len(tokens) - len(model.pieces))
    return _with_scores(tokens, scores, kinds, model.adds_prefix)


def _scored(content: Mapping[str, Any], vocab_size: int) -> dict[str, Any] | None:
    """The tokenizers library's form of the same: earlier merges win, which are higher scores."""
    vocabulary = content["model"]["vocab"]
    tokens, kinds = _tokens_and_kinds(vocabulary, content, vocab_size)
    scores = [0.0] * len(tokens)
    for rank, merge in enumerate(content["model"].get("merges", [])):
        merged = vocabulary.get("".join(merge.split(" ", 1) if isinstance(merge, str) else merge))
        if merged is not None and scores[merged] == 0.0:
            scores[merged] = -float(rank + 1)
    for token, number in vocabulary.items():
        if len(token) == 6 and token.startswith("<0x"):
            kinds[number] = BYTE
    unknown = content["model"].get("unk_token")
    if unknown in vocabulary:
        kinds[vocabulary[unknown]] = UNKNOWN
    prefix = "Prepend" in json.dumps(content.get("normalizer")) or "first" in json.dumps(content.get("pre_tokenizer"))
    return _with_scores(tokens, scores, kinds, prefix)


def _with_scores(tokens: list[str], scores: list[float], kinds: list[int], adds_prefix: bool) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": adds_prefix,
    }


# -- special tokens and templates ----------------------------------------------------------------------


def _roles(settings: Mapping[str, Any], files: Mapping[str, bytes], tokens: Sequence[str]) -> dict[str, int]:
    ids = {token: number for number, token in reversed(list(enumerate(tokens)))}
    named = {**_json(files, "special_tokens_map.json"), **settings}
    numbers: dict[str, int | None] = {}
    for role in ROLES:
        token = named.get(f"{role}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            numbers[role] = ids.get(token)
    return _ids(numbers, _json(files, GENERATION), len(tokens))


def _ids(numbers: Mapping[str, int | None], generation: Mapping[str, Any], size: int) -> dict[str, int]:
    """Keys of the file for the roles. numbers: of the roles that the tokenizer names; the others are those of the
    defaults of generation."""
    role_ids = {}
    for role, name in ROLES.items():
        number: Any = numbers[role] if role in numbers else generation.get(f"{role}_token_id")
        # Of several ends the first is that of a text.
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < size:
            role_ids[f"tokenizer.ggml.{name}_token_id"] = number
    ends = _ends(generation, role_ids.get(EOS), size)
    further = dict(zip(FURTHER_ENDS, ends, strict=False))
    return role_ids | {f"tokenizer.ggml.{name}_token_id": number for name, number in further.items()}


def _ends(generation: Mapping[str, Any], eos: int | None, size: int) -> list[int]:
    """Ids of the defaults of generation at which a text ends too, each once."""
    listed = generation.get("eos_token_id")
    numbers = listed if isinstance(listed, list) else [listed]
    return [
        number
        for number in dict.fromkeys(number for number in numbers if isinstance(number, int))
        if number != eos and 0 <= number < size
    ]


def ends_left_out(files: Mapping[str, bytes], metadata: Mapping[str, Any], vocab_size: int) -> list[str]:
    """A sentence about the ends of a text for which a file with `metadata` has no key; none where it has all."""
    size = len(metadata.get("tokenizer.ggml.tokens", ())) or vocab_size
    left_out = _ends(_json(files, GENERATION), metadata.get(EOS), size)[len(FURTHER_ENDS) :]
    if not left_out:
        return []
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", *FURTHER_ENDS)}
    known = ", ".join(f"{name}={number}" for name, number in ids.items())
    return [
        f"{GENERATION}: left out of eos_token_id, since a GGUF file has keys for three ends of a text ({known}): "
        f"{', '.join(map(str, left_out))}"
    ]


def _adds(content: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, bool]:
    """Whether a text begins with the first special token: what the tokenizer does, and where it does not say, what its
    settings want."""
    processors = json.dumps(content.get("post_processor") or {})
    bos = settings.get("add_bos_token")
    if "TemplateProcessing" in processors:
        first = json.loads(processors)
        parts = first.get("processors", [first])
        single = next(part["single"] for part in parts if part.get("type") == "TemplateProcessing")
        bos = bool(single) and "SpecialToken" in single[0]
    elif content:
        bos = bool(bos) and content.get("model", {}).get("byte_fallback", False)
    return {"tokenizer.ggml.add_bos_token": bool(True if bos is None else bos)}


def _templates(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, Any]:
    templates: dict[str, Any] = {}
    default: Any = settings.get("chat_template")
    if isinstance(default, list):  # older files have all of them here
        named = {entry.get("name"): entry.get("template") for entry in default if isinstance(entry, Mapping)}
        default = named.pop("default", None)
        templates |= {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    for name in (CHAT_TEMPLATE, TRAINED_TEMPLATE):
        default = files[name].decode() if name in files else default
    if isinstance(default, str):
        templates["tokenizer.chat_template"] = default
    prefix = f"{MORE_TEMPLATES}/"
    more = {
        name.removeprefix(prefix).removesuffix(".jinja"): data
        for name, data in files.items()
        if name.startswith(prefix)
    }
    if more:
        templates["tokenizer.chat_templates"] = sorted(more)
        templates |= {f"tokenizer.chat_template.{name}": data.decode() for name, data in more.items()}
    return templates

"""Files of tokenizers and processors beside a model's weights, and which tokenizer of mt reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mt_core.errors import CheckpointError
from mt_core.paths import children
from mt_core.specs import TRAINED_TEMPLATE

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""By which processors make images for the model; the second, of newer versions, has the content of the first as
`image_processor`."""
VIDEO_PREPROCESSOR = "video_preprocessor_config.json"
"""Without it processors of models that also take videos cannot be loaded."""
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of further templates, NAME.jinja, which tokenizers and processors know as NAME."""
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    PREPROCESSOR,
    PROCESSOR,
    VIDEO_PREPROCESSOR,
)
GENERATION = "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_SETTINGS = ("_from_model_config", "transformers_version")
"""Keys of generation_config.json that say where it comes from."""
DECODER_START = "decoder_start_token_id"
"""Key of encoder-decoder models: the id with which the decoder begins."""


def read_tokenizer_files(
    path: Path, external: Mapping[str, Any], read: Callable[[Path], bytes] = lambda file: file.read_bytes()
) -> dict[str, bytes]:
    """The tokenizer's files in `path`, and the defaults of generation (those of config.json if they have no file).

    read: gives the content of a file.
    """
    files = {name: read(path / name) for name in (*FILES, GENERATION) if (path / name).is_file()}
    templates = sorted(file.name for file in children(path / MORE_TEMPLATES) if file.name.endswith(".jinja"))
    files |= {f"{MORE_TEMPLATES}/{name}": read(path / MORE_TEMPLATES / name) for name in templates}
    if GENERATION not in files:
        ids = {key: external[key] for key in (*SPECIAL_IDS, DECODER_START) if external.get(key) is not None}
        if ids:
            files[GENERATION] = generation_defaults(ids)
    if "spiece.model" in files:  # mt's name for every SentencePiece model
        files.setdefault("tokenizer.model", files["spiece.model"])
    return files


def image_processor(files: Mapping[str, bytes]) -> Mapping[str, Any] | None:
    """How images are made for the model, if the files say it.

    Raises CheckpointError for a file that is no JSON object.
    """
    # Newer processors have one file with a section for each part; it wins over the older file.
    within = _json_object(files, PROCESSOR).get("image_processor")
    if isinstance(within, Mapping):
        return within
    return _json_object(files, PREPROCESSOR) if PREPROCESSOR in files else None


def _json_object(files: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{name} holds {type(content).__name__}; it has to be a JSON object")
    return content


def generation_defaults(ids: Mapping[str, Any]) -> bytes:
    """The content of generation_config.json."""
    return (json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n").encode()


def lost_settings(before: bytes, after: bytes | None) -> list[str]:
    """Names of settings of a generation_config.json that another one does not have, or has otherwise; further ids of
    ends are no difference. None: there is no other file, which is then missing as a whole."""
    if after is None:
        return []
    old, new = (_json_object({GENERATION: data}, GENERATION) for data in (before, after))
    return [key for key, value in old.items() if key not in NO_SETTINGS and not _holds(new.get(key), value)]


def _holds(after: Any, before: Any) -> bool:
    if isinstance(before, list):
        return set(before) <= {*(after if isinstance(after, list) else [after])}
    return after == before or (isinstance(after, list) and before in after)


def template_in_settings(files: Mapping[str, bytes]) -> bool:
    """Whether tokenizer_config.json has a chat template, in place of a file of its own."""
    return bool(_json_object(files, "tokenizer_config.json").get("chat_template"))


def tokenizer_config(path: Path, files: Mapping[str, bytes], vocab_size: int | None) -> dict[str, Any]:
    """The [tokenizer] section that reads these files; without any, one that takes ids as they are."""
    # From the most to the least complete: tokenizer.json has the whole tokenizer, the others its parts.
    if "tokenizer.json" in files:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(path)}
    if {"vocab.json", "merges.txt"} <= set(files):
        places = {"vocab_file": str(path / "vocab.json"), "merge_file": str(path / "merges.txt")}
        return {"tokenizer_type": "GPT2BPETokenizer", **places}
    if "vocab.txt" in files:
        kind = "BertWordPieceLowerCase" if _lower_case(files) else "BertWordPieceCase"
        return {"tokenizer_type": kind, "vocab_file": str(path / "vocab.txt")}
    # Transformers calls T5's SentencePiece model spiece.model, Llama's tokenizer.model.
    for name, kind in (("spiece.model", "SentencePieceTokenizer"), ("tokenizer.model", "Llama2Tokenizer")):
        if name in files:
            return {"tokenizer_type": kind, "tokenizer_model": str(path / name)}
    return {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size}


def _lower_case(files: Mapping[str, bytes]) -> bool:
    """What tokenizer_config.json says; BERT's own default is lower case."""
    try:
        return bool(json.loads(files.get("tokenizer_config.json", b"{}")).get("do_lower_case", True))
    except (ValueError, AttributeError):
        return True


# -- the way back -----------------------------------------------------------------------------------

CLASSES = {
    "GPT2BPETokenizer": {"tokenizer_class": "GPT2Tokenizer"},
    "BertWordPieceLowerCase": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
    "BertWordPieceCase": {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    "Llama2Tokenizer": {"tokenizer_class": "LlamaTokenizer"},
}
"""What `AutoTokenizer` has to be given for files that do not say it themselves."""


def files_to_write(files: Mapping[str, bytes], tokenizer: Mapping[str, Any]) -> dict[str, bytes]:
    """The tokenizer's files under Hugging Face's names, with the tokenizer's class named."""
    written = {name: data for name, data in files.items() if takes_file(name) and name != TRAINED_TEMPLATE}
    # What the model was trained with has the last word; transformers prefers this file to tokenizer_config.json.
    if TRAINED_TEMPLATE in files:
        written[CHAT_TEMPLATE] = files[TRAINED_TEMPLATE]
    named = CLASSES.get(str(tokenizer.get("tokenizer_type")))
    # Without tokenizer_config.json AutoTokenizer guesses by the model's type.
    if named and "tokenizer.json" not in written and "tokenizer_config.json" not in written:
        written["tokenizer_config.json"] = (json.dumps(named, indent=2) + "\n").encode()
    return written


def takes_file(name: str) -> bool:
    return name in (*FILES, GENERATION, TRAINED_TEMPLATE) or name.startswith(f"{MORE_TEMPLATES}/")


def special_ids(files: Mapping[str, bytes]) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id as the defaults of generation have them, None where they do not;
    and decoder_start_token_id, if they have it."""
    try:
        stored = json.loads(files.get(GENERATION, b"{}"))
    except ValueError:
        stored = {}
    start = stored.get(DECODER_START)
    return {**{key: stored.get(key) for key in SPECIAL_IDS}, **({} if start is None else {DECODER_START: start})}

"""Declarations of how a family's configuration stands in an external format's, read in both directions.

Every field of the external configuration is mapped, or named with the reason why it does not matter, or an
error: a field that is dropped in silence is a model that computes something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_core.config_types import require_types
from mt_core.errors import CheckpointError, ConfigError
from mt_core.specs import MODELS

if TYPE_CHECKING:
    from mt_core.plugins import PluginHost


def unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """One key there, one key of [model] here.

    import_value, export_value: translate the value. default: the external default when the key is absent.
    """

    theirs: str
    ours: str
    import_value: Callable[[Any], Any] = unchanged
    export_value: Callable[[Any], Any] = unchanged
    default: Any = None


@dataclass(frozen=True)
class Fixed:
    """A key there that can only have these values, since the family means them.

    The first is written. written=False: a key that only some files have, and that no program reads.
    """

    theirs: str
    values: tuple[Any, ...]
    written: bool = True


@dataclass(frozen=True)
class ConfigMap:
    """The configuration of one family in one external format."""

    architecture: str
    """How the format names the family: `model_type` for Hugging Face."""
    fields: tuple[Field, ...]
    fixed: tuple[Fixed, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Key -> why it changes nothing that is computed."""
    import_extra: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Keys of [model] that depend on several external ones; receives the whole external configuration."""
    import_extra_keys: tuple[str, ...] = ()
    """External keys that `import_extra` reads."""
    export_extra: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """The way back: external keys from the whole of [model]."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Another name of a key -> the key, which is written."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Key that has to be true -> what a file without it is. Checked first: such a file is of another map."""
    written: bool = True
    """False: a type with further parts, of which the text alone is read; it is written as another type."""

    def import_value(self, external: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of [model]. Raises ConfigError for a field that is unknown or has a value that is not supported."""
        external = self._with_one_spelling(external)
        for key, otherwise in self.required.items():
            if external.get(key) is not True:
                raise ConfigError(f"{key} is not true: {otherwise}")
        # What `import_extra` reads has to be listed, since it receives the whole configuration.
        known = (
            {f.theirs for f in self.fields} | {f.theirs for f in self.fixed} | {*self.ignored, *self.import_extra_keys}
        )
        unknown = sorted(set(external) - known)
        if unknown:
            raise ConfigError(
                f"the configuration of this {self.architecture} has fields that are not known: "
                f"{', '.join(f'{key}={external[key]!r}' for key in unknown)}"
            )
        for entry in self.fixed:
            if entry.theirs in external and external[entry.theirs] not in entry.values:
                legal = " or ".join(repr(value) for value in entry.values)
                raise ConfigError(f"{entry.theirs}={external[entry.theirs]!r} is not supported; it can be {legal}")
        values = {
            f.ours: _translated(f.import_value, external.get(f.theirs, f.default), [f.theirs]) for f in self.fields
        }
        if self.import_extra is not None:
            values.update(_translated(self.import_extra, external, self.import_extra_keys))
        # A key that is absent takes the default of [model].
        return {key: value for key, value in values.items() if value is not None}

    def _with_one_spelling(self, external: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ConfigError for two names of one key with different values: which one counts depends on the reader."""
        values = dict(external)
        for other, key in self.spellings.items():
            if other in values and values.setdefault(key, values[other]) != values.pop(other):
                raise ConfigError(
                    f"{key}={external[key]!r} and {other}={external[other]!r} contradict each other; they mean the "
                    "same, so remove what is wrong"
                )
        return values

    def export_value(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """The external configuration of a [model] section with every key present."""
        values = {f.theirs: f.export_value(model.get(f.ours)) for f in self.fields}
        values.update({entry.theirs: entry.values[0] for entry in self.fixed if entry.written})
        if self.export_extra is not None:
            values.update(self.export_extra(model))
        return values


def _translated(translate: Callable[[Any], Any], value: Any, keys: Sequence[str]) -> Any:
    """What `translate` makes of a value (that of a key, or a table of several); ConfigError that names the keys for
    one that it was not written for."""
    try:
        return translate(value)
    except ConfigError as error:
        if any(key in str(error) for key in keys) or _names_field(str(error), value):
            raise
        raise ConfigError(f"{_shown(value, keys)} cannot be used: {error}") from None
    # What a conversion of an unexpected value may raise; other exceptions are defects of the map.
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{_shown(value, keys)} cannot be used: {error}") from error


def _names_field(message: str, value: Any) -> bool:
    """Whether a message names a field of a configuration within `value`, which is a table."""
    return isinstance(value, Mapping) and any(
        f"{key}=" in message or _names_field(message, inner) for key, inner in value.items()
    )


def _shown(value: Any, keys: Sequence[str]) -> str:
    table = value if isinstance(value, Mapping) else {keys[0]: value}
    return ", ".join(f"{key}={table[key]!r:.80}" for key in keys if key in table) or "the configuration"


def require_known(kind: str, value: str, allowed: Iterable[str]) -> str:
    """`value`, or ConfigError with the values that are supported."""
    names = list(allowed)
    if value not in names:
        raise ConfigError(f"{kind}={value!r} is not supported; it can be {', '.join(names)}")
    return value


# -- Hugging Face: the model that a config.json describes, without weights ---------------------------

CONFIG = "config.json"
HF_FORMAT = "hf"


QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json that say how tensors are stored, in the order in which they count. The second is what
compressed-tensors wrote at first, the third is MLX's."""


def unquantized(external: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as that of an unquantized folder. Of a model of text and images those of the text go too."""
    plain = {key: value for key, value in external.items() if key not in QUANTIZATION_KEYS}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = unquantized(plain["text_config"])
    return plain


PARTS = ("text_config", "vision_config", "audio_config", "thinker_config")
"""Keys of config.json that hold the configuration of a part of the model."""


def require_readable(external: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value of config.json that is of another type than its field has."""
    _require_parts(external)
    _require_type_names(external)
    require_types(external)


def _require_parts(external: Mapping[str, Any]) -> None:
    """Raises ConfigError for a part of config.json that is neither an object nor null, which is its defaults."""
    for key in PARTS:
        part = external.get(key)
        if isinstance(part, Mapping):
            _require_parts(part)
        elif part is not None:
            raise ConfigError(
                f"{key}={part!r:.80} is not supported; it can be a JSON object with the keys of that part of the model"
            )


def _require_type_names(external: Mapping[str, Any]) -> None:
    """Raises ConfigError for a model_type that is no text, and for architectures that are neither null nor texts."""
    kind, listed = external.get("model_type", ""), external.get("architectures")
    if not isinstance(kind, str):
        raise ConfigError(f"model_type={kind!r:.80} is not supported; it can be the name of a type of model")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
        raise ConfigError(f"architectures={listed!r:.80} is not supported; it can be a list of names of classes")


def read_hf_config(path: Path) -> dict[str, Any]:
    """path: config.json, or the folder that holds it. Raises ConfigError when that is no JSON object with a
    model_type."""
    file = path / CONFIG if path.is_dir() else path
    try:
        external = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as the config.json of a model: {error}") from None
    if not isinstance(external, dict) or "model_type" not in external:
        raise ConfigError(f"{file} has no model_type; give the config.json of a Hugging Face model, or its folder")
    return external


def tokenizer_section(external: Mapping[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """The keys of [tokenizer] for a program that gives ids itself: their number, and the end of a document."""
    tokenizer: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size}
    eod = external.get("eos_token_id")
    # Some configurations have a list of ids, or one that is not in the vocabulary.
    if isinstance(eod, int) and vocab_size is not None and 0 <= eod < vocab_size:
        tokenizer["null_tokenizer_eod_id"] = eod
    return tokenizer


def installed_families(host: PluginHost) -> tuple[list[Any], list[str]]:
    """The maps of all families of Hugging Face's, and what is wrong with those that cannot be imported."""
    families: list[Any] = []
    broken: list[str] = []
    for spec in host[MODELS]:
        if HF_FORMAT not in spec.name_maps:
            continue
        try:
            families.append(spec.name_maps[HF_FORMAT].load())
        except (ImportError, AttributeError) as error:  # another family must not suffer from it
            broken.append(f"{spec.name} ({error})")
    return families, broken


def families_of(external: Mapping[str, Any], host: PluginHost) -> list[Any]:
    """The families that know the model_type of a config.json; never none.

    Raises ConfigError for a value of another type than its field has, and for a type that no family has.
    """
    require_readable(external)
    kind = external.get("model_type")
    families, broken = installed_families(host)
    able = [family for family in families if kind in family.model_types]
    if able:
        return able
    known = ", ".join(sorted({name for family in families for name in family.model_types})) or "none"
    lost = f"; families whose maps cannot be loaded: {'; '.join(broken)}" if broken else ""
    raise ConfigError(f"config.json: model_type={kind!r} is of no installed model family; known are {known}{lost}")


def model_section(external: Mapping[str, Any], host: PluginHost) -> dict[str, Any]:
    """The keys of [model] that a config.json says. Of several families that know its model_type (a base model, the same
    with a head) that which has its architecture.

    Raises ConfigError for what `families_of` refuses, and for what the family cannot express.
    """
    able, listed = families_of(external, host), external.get("architectures") or [None]
    # "architectures" names the class that was saved, such as one with a classification head.
    named = next((family for family in able if listed[0] in family.architectures.values()), None)
    if named is not None:
        return dict(named.read_config(external))
    # A file without it is that of the first family that can read it.
    reasons: dict[str, Exception] = {}
    for family in able:
        try:
            return dict(family.read_config(external))
        except ConfigError as error:
            reasons[family.family] = error
    raise all_refuse(reasons)


def all_refuse(reasons: Mapping[str, Exception]) -> Exception:
    """What to raise where each family that knows a model_type refuses a file. reasons: family -> its error. The error
    itself where all say the same; else a ConfigError with those of all, since any of them may be the one that is
    meant."""
    if len({str(error) for error in reasons.values()}) == 1:
        return next(iter(reasons.values()))
    listed = "; ".join(f"model.family={family}: {error}" for family, error in reasons.items())
    return ConfigError(f"config.json fits none of the families that know its model_type: {listed}")


# -- Megatron-Core: `ModelSpec.name_maps["megatron"]` ------------------------------------------------
#
# Megatron's checkpoints carry the arguments of their run, which say what the model is. Parameters need no map:
# canonical names and layouts are Megatron-Core's.

MEGATRON_FORMAT = "megatron"
"""The key of `name_maps`."""


@dataclass(frozen=True)
class MegatronArguments:
    """The attributes of Megatron's Namespace, of the file `origin`."""

    values: Mapping[str, Any]
    origin: Path

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        """The argument, or `default` where a version does not have it or it is None."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, *names: str) -> Any:
        """The first of the arguments that is there. Raises CheckpointError when none is."""
        for name in names:
            if (value := self.values.get(name)) is not None:
                return value
        raise CheckpointError(f"{self.origin}: its args do not have {' or '.join(names)}")

    @property
    def untied(self) -> bool:
        return bool(self.get("untie_embeddings_and_output_weights", False))


WriteArguments = Callable[[Any, Collection[str], Mapping[str, Any]], dict[str, Any]]
"""(the [model] configuration, canonical names of its parameters, arguments that came from Megatron) -> arguments.

Raises ConfigError, naming the key, for a model that Megatron does not have."""
ReadSection = Callable[[MegatronArguments, Collection[str]], dict[str, Any] | None]
"""(arguments of a checkpoint, canonical names of its parameters) -> keys of [model] but `family` and `vocab_size`;
None: a model of another family. Raises ConfigError, naming the argument, for a model that cannot be."""


@dataclass(frozen=True, kw_only=True)
class MegatronMap:
    """How one family stands among Megatron-Core's arguments.

    arguments: writes them; None where Megatron has no such model. section: reads them; None where no checkpoint of
    Megatron's is read as this family. takes: whether a model is one of this family; all other arguments than those that
    the family `reads` have then to be as its plain models have them. Families without `takes` are asked first: they
    have arguments of their own, and say by a section of None that a model is none of theirs. unsupported: why Megatron
    has no such model.
    """

    arguments: WriteArguments | None = None
    section: ReadSection | None = None
    takes: Callable[[MegatronArguments, Collection[str]], bool] | None = None
    reads: tuple[str, ...] = ()
    unsupported: str | None = None

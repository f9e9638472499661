"""Reads Hugging Face's format, and whatever else can be put into its names, as a canonical checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from mt_ckpt.files.checksum_file import WrittenFiles
from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import SafetensorsFile, TensorInfo
from mt_ckpt.files.stored_formats import StoredFormat
from mt_ckpt.hugging_face.absent_layers import absent_layers
from mt_ckpt.hugging_face.activation_scales import ActivationScales
from mt_ckpt.hugging_face.base_class import with_prefix, without_head
from mt_ckpt.hugging_face.family import Family, held_config, require_names
from mt_ckpt.hugging_face.tensors import TensorFile, TensorFiles, infer, with_elements
from mt_ckpt.hugging_face.tokenizer import image_processor, read_tokenizer_files, tokenizer_config
from mt_ckpt.hugging_face.variants import identify_variant
from mt_ckpt.pickles.torch_file import NamedTensorsFile
from mt_ckpt.quantized.methods import BESIDE, dequantized
from mt_ckpt.quantized.weights import DequantizedTensors, Parts, QuantizedWeight, format_of
from mt_core.checkpoint_lookup import MODEL
from mt_core.config_map import tokenizer_section
from mt_core.errors import CheckpointError, did_you_mean
from mt_core.name_map import Rule
from mt_core.plugins import PluginHost

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order of preference; each may be cut into files that `<name>.index.json` lists."""
SPECIAL_FLOAT = "__float__"


def detect(path: Path) -> bool:
    """Whether `path` has config.json and weights under a name that `save_pretrained` gives."""
    return (path / CONFIG).is_file() and _weights_of(path) is not None


def open_checkpoint(path: Path, host: PluginHost) -> HuggingFaceReader:
    """Open a directory that `save_pretrained` wrote.

    Raises CheckpointError for files that are missing or damaged (of a conversion of mt's: that are not what it wrote)
    and tensors that do not fit, and ConfigError for a configuration that no installed family can be built from.
    """
    written = WrittenFiles(path)
    external = _read_json(path / CONFIG, written)
    tensors, external = dequantized(_open_tensors(path, written), _with_settings_beside(path, external, written))
    tensors = with_elements(tensors)
    external = without_head(external, tensors.infos)
    tensors = with_prefix(tensors)
    identified = identify_variant(external, list(tensors.infos), host)
    family, config = identified.family, identified.config
    # Optional in a family of a plugin.
    stated = getattr(family, "ids_of_generation", lambda external: external)(external)
    files = read_tokenizer_files(path, stated, written.read)
    sections = {
        **identified.sections,
        "model": config.model.model_dump(mode="json"),
        "tokenizer": tokenizer_config(path, files, config.model.vocab_size),
        **_image_data(family, config.model, files),
    }
    absent = absent_layers(external, held_config(family, external, list(tensors.infos)))
    absent += getattr(family, "left_out_ids", lambda external: [])(external)
    absent += getattr(family, "left_out_experts", lambda external, model: [])(external, config.model)
    return HuggingFaceReader(tensors, family, config.model, {"iteration": 0, "config": sections}, files, absent)


def _with_settings_beside(path: Path, external: dict[str, Any], written: WrittenFiles) -> dict[str, Any]:
    """config.json, with the settings of quantization that ModelOpt writes beside it."""
    file = path / BESIDE
    return {**external, BESIDE: _read_json(file, written)} if file.is_file() else external


def _image_data(family: Family, model: Any, files: Mapping[str, bytes]) -> dict[str, Any]:
    """The section [data] that makes images as the folder's processor does."""
    external = image_processor(files)
    if family.preprocessor is None or external is None:
        return {}
    return {"data": dict(family.preprocessor.read(model, external))}


@dataclass(frozen=True)
class StoredWeight:
    """A quantized tensor of a folder. read: its parts, role -> stored tensor, with scales that were looked at."""

    weight: QuantizedWeight
    read: Callable[[], Parts]

    def refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.weight.name}: {why}")


class HuggingFaceReader:
    """Tensors under external names, read under canonical ones (a `CheckpointReader`)."""

    def __init__(
        self,
        tensors: ExternalTensors,
        family: Family,
        model: Any,
        metadata: Mapping[str, Any],
        files: Mapping[str, bytes],
        absent: Sequence[str] = (),
    ) -> None:
        """model: the [model] section. absent: a sentence each about what config.json counts and the files have not, and
        about what it says of parts that are left out.

        Raises CheckpointError for missing, unknown and doubled names.
        """
        require_names(family, model, tensors.infos)
        self.metadata = metadata
        self._tensors, self._files = tensors, files
        self._stored = _by_spelling(tensors, family, model)
        self._copies = _present_copies(family.copies(model), self._stored)
        # Optional in a family of a plugin.
        self._repeated: Mapping[str, str] = getattr(family, "left_out_copies", lambda model: {})(model)
        self._absent = absent
        names = family.name_map(model).reading(self._stored)
        self._rules = {MODEL + rule.ours: rule for rule in names.rules}
        self.left_out: Mapping[str, int] = names.left_out(self._stored)
        """Patterns of names that are parts of the published model beside this one, and the number of their tensors."""

    @cached_property
    def _infos(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes, by carrying out the rules on tensors without values."""
        return {name: _carried_out(name, rule, self._info) for name, rule in self._rules.items()}

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._infos.items()}

    @cached_property
    def _dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: info.dtype for name, info in self._infos.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._dtypes

    def read(self, name: str) -> Tensor:
        """One canonical tensor. Raises CheckpointError for an unknown name, a damaged file, and a tensor that
        differs from one that the configuration ties to it."""
        rule = self._rules.get(name)
        if rule is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}{did_you_mean(name, self._rules)}")
        return rule.import_value([self._read(source) for source in rule.sources])

    def external(self, name: str, rule: Rule) -> Mapping[str, TensorInfo] | None:
        """What `rule` makes of a canonical tensor, where the files have it just so; None: they have another form."""
        file_rule = self._rules.get(name)
        if file_rule is None or replace(file_rule, others=()) != replace(rule, others=(), ours=file_rule.ours):
            return None
        return {source: self._info(source) for source in file_rule.sources}

    def read_external(self, source: str) -> Tensor:
        """A tensor that `external` has named. Raises what `read` raises."""
        return self._read(source)

    def files(self) -> Mapping[str, bytes]:
        return self._files

    def notes(self) -> list[str]:
        """What of the files is not as config.json and names say, a sentence each.

        Layers that they have not, and tensors that are left out for another one and differ from it; these are read.
        """
        differing = [
            f"left out, though it differs from {original}, which is used in its place: {copy}"
            for copy, original in self._repeated.items()
            if {copy, original} <= self._stored.keys() and self._differ(copy, original)
        ]
        return [*self._absent, *differing]

    def _differ(self, first: str, second: str) -> bool:
        return not same_bits(self._tensors.read(self._stored[first]), self._tensors.read(self._stored[second]))

    def require_scales(self) -> None:
        """Read all scales of a quantized folder. Raises CheckpointError that names the first that is none."""
        if isinstance(self._tensors, DequantizedTensors):
            self._tensors.require_scales()

    def activation_scales(self) -> ActivationScales | None:
        """None: the folder is not quantized."""
        if not isinstance(self._tensors, DequantizedTensors):
            return None
        return ActivationScales(
            self._tensors.stored, lambda name: [self._stored[source] for source in self._rules[name].sources]
        )

    def stored_formats(self) -> Mapping[str, StoredFormat]:
        return {name: _stored_as(rule, self._tensors, self._stored) for name, rule in self._rules.items()}

    def stored_weights(self, name: str) -> tuple[Rule, Mapping[str, StoredWeight | None]]:
        """The rule of a canonical tensor, and each of its sources as it is stored; None: unquantized."""
        rule, tensors = self._rules[name], self._tensors
        if not isinstance(tensors, DequantizedTensors):
            return rule, dict.fromkeys(rule.sources)
        weights = {source: tensors.weights.get(self._stored[source]) for source in rule.sources}
        return rule, {
            source: None if weight is None else StoredWeight(weight, partial(tensors.read_parts, weight))
            for source, weight in weights.items()
        }

    def _info(self, source: str) -> TensorInfo:
        return self._tensors.infos[self._stored[source]]

    def _read(self, source: str) -> Tensor:
        tensor = self._tensors.read(self._stored[source])
        for copy in self._copies.get(source, ()):
            # Some programs save tied tensors under both names. If they differ, one of the two would be lost silently.
            if not same_bits(tensor, self._tensors.read(self._stored[copy])):
                raise CheckpointError(_differing(copy, source))
        return tensor


def _differing(copy: str, source: str) -> str:
    # Layers of multi-token prediction repeat embedding and LM head, whatever is tied.
    if ".layers." in copy:
        return (
            f"{copy} repeats {source}, which the model has once, but the two differ in the checkpoint; remove the "
            "first from its tensors if the second is to be used in its place, as programs that draft tokens do"
        )
    return (
        f"the configuration ties {copy} to {source}, but the two differ in the checkpoint; set "
        f"tie_word_embeddings to false in its {CONFIG} if the first is to be used"
    )


def _stored_as(rule: Rule, tensors: ExternalTensors, stored: Mapping[str, str]) -> StoredFormat:
    """How the external tensors that a canonical one is made of are stored; several formats are joined."""
    forms = [format_of(tensors, stored[source]) for source in rule.sources]
    listed = " | ".join(dict.fromkeys(form.format for form in forms if form.format))
    return StoredFormat(listed, sum(form.num_bytes for form in forms), any(form.quantized for form in forms))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two contiguous tensors have one dtype, one shape and the same bytes (NaN equals itself)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # Bytes: NaN compares equal, and -0.0 differs from 0.0.
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def _by_spelling(tensors: ExternalTensors, family: Family, model: Any) -> dict[str, str]:
    """The map's name -> the stored one; an original that is stored only as its copy is found there."""
    stored: dict[str, str] = {}
    for name in tensors.infos:
        spelled = family.spelling(model, name)
        if spelled in stored:
            raise CheckpointError(f"{stored[spelled]} and {name} both are {spelled}")
        stored[spelled] = name
    for copy, original in family.copies(model).items():
        # Only the copy is stored (lm_head without embeddings): it stands for the original.
        if copy in stored:
            stored.setdefault(original, stored[copy])
    return stored


def _present_copies(copies: Mapping[str, str], stored: Mapping[str, str]) -> dict[str, list[str]]:
    """Original -> its copies that are stored beside it."""
    present: dict[str, list[str]] = {}
    for copy, original in copies.items():
        if copy in stored and stored[copy] != stored.get(original):
            present.setdefault(original, []).append(copy)
    return present


def _carried_out(name: str, rule: Rule, info_of: Callable[[str], TensorInfo]) -> TensorInfo:
    inputs = [info_of(source) for source in rule.sources]
    try:
        # Shapes that do not fit make the rule itself fail, as they would on reading.
        (output,) = infer(lambda tensors: [rule.import_value(tensors)], inputs)
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{source} {list(info.shape)}" for source, info in zip(rule.sources, inputs, strict=True))
        raise CheckpointError(f"{shapes}: these shapes do not make {name} of this configuration: {error}") from None
    return output


# -- the directory ----------------------------------------------------------------------------------


def _weights_of(path: Path) -> Path | None:
    candidates = [path / file for name in WEIGHTS for file in (name, f"{name}.index.json")]
    return next((file for file in candidates if file.is_file()), None)


def _open_tensors(path: Path, written: WrittenFiles) -> TensorFiles:
    weights = _weights_of(path)
    if weights is None:
        raise CheckpointError(f"{path}: has none of {', '.join(WEIGHTS)}, nor an index of one")
    if weights.suffix != ".json":
        return TensorFiles([open_tensor_file(weights, written)])
    return open_listed_files(path, weights, written)


def open_listed_files(path: Path, weights: Path, written: WrittenFiles) -> TensorFiles:
    """The tensors of the files in `path` that the index `weights` lists. Raises CheckpointError for files that are
    missing or hold other tensors than it says."""
    listed = _read_json(weights, written).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{weights}: has no weight_map from tensors to files")
    files = [_inside(path, name, weights) for name in sorted(set(listed.values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{weights}: lists files that are not there: {', '.join(absent)}")
    tensors = TensorFiles([open_tensor_file(file, written) for file in files])
    # Both ways: a file that was replaced or is of another model shows in the names.
    if missing := sorted(set(listed) - set(tensors.infos)):
        raise CheckpointError(f"{weights}: lists tensors that its files do not have: {', '.join(missing[:8])}")
    if further := sorted(set(tensors.infos) - set(listed)):
        raise CheckpointError(f"{weights}: its files have tensors that it does not list: {', '.join(further[:8])}")
    return tensors


def open_tensor_file(file: Path, written: WrittenFiles) -> TensorFile:
    # Files of torch.save have checksums of their own.
    return SafetensorsFile(file, written.require) if file.suffix == ".safetensors" else NamedTensorsFile(file)


def _inside(path: Path, name: str, index: Path) -> Path:
    # A name such as ../x would read outside of the checkpoint.
    if Path(name).name != name:
        raise CheckpointError(f"{index}: lists the file {name!r}, which is not in {path}")
    return path / name


def _read_json(file: Path, written: WrittenFiles) -> dict[str, Any]:
    try:
        content = json.loads(written.read(file), object_hook=_number_or_object)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return content


def _number_or_object(entries: dict[str, Any]) -> Any:
    """Since version 5 transformers writes an infinite number as {"__float__": "Infinity"}."""
    return float(entries[SPECIAL_FLOAT]) if set(entries) == {SPECIAL_FLOAT} else entries


# -- a module of transformers in memory ----------------------------------------------------------------


class PreTrainedConfigLike(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


class PreTrainedModelLike(Protocol):
    """A `transformers.PreTrainedModel`."""

    @property
    def config(self) -> PreTrainedConfigLike: ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


class ModuleTensors:
    """The state dict of a module, under its own names (see ExternalTensors)."""

    def __init__(self, module: PreTrainedModelLike) -> None:
        self._state = module.state_dict()
        # state_dict has tied parameters under each of their names, as files may have.
        self.infos = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in self._state.items()}

    def read(self, name: str) -> Tensor:
        return self._state[name].detach().cpu().contiguous()


def read_module(module: PreTrainedModelLike, host: PluginHost) -> HuggingFaceReader:
    """The weights of a transformers model under canonical names; `metadata["config"]` has its [model] and [tokenizer].

    The reader looks at the module's memory: it is to be kept until the weights are read. Raises ConfigError for a
    model_type without a name map, and CheckpointError for tensors that do not fit its configuration.
    """
    # The class is the architecture, also of a module that was built and not loaded.
    external = {**module.config.to_dict(), "architectures": [type(module).__name__]}
    stored = ModuleTensors(module)
    external = without_head(external, stored.infos)
    tensors = with_prefix(stored)
    identified = identify_variant(external, list(tensors.infos), host)
    family, config = identified.family, identified.config
    model = {"family": family.family, **config.model.model_dump(mode="json", exclude_defaults=True)}
    sections = {
        **identified.sections,
        "model": model,
        "tokenizer": tokenizer_section(external, config.model.vocab_size),
    }
    return HuggingFaceReader(tensors, family, config.model, {"iteration": 0, "config": sections}, {})

"""One changed field of a config.json: what mt makes of it beside what `transformers` does."""

from __future__ import annotations

import copy
import filecmp
import json
import logging
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.ckpt import config_values
from tests.ckpt.family_cases import AUDIO, IMAGE, SOUND_SAMPLES, Case, class_named, inputs_of, make_model
from tests.ckpt.first_of_equal import first_of_equal
from tests.ckpt.fixed_dropout import dropout_by_feature
from tests.ckpt.larger_classes import BESIDE_TEXT, LARGER_CLASSES, SWEEP_CASES
from tests.models.qwen3_omni_reference import reference_features, sound
from torch import Tensor, nn

from mt_ckpt.hugging_face.reader import open_checkpoint
from mt_ckpt.model import build_model, expected_parameters, model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.errors import MtError
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS
from mt_core.train.checkpoint.state import load_parameters, require_fit
from mt_models.sound.spectrogram import gemma_spectrogram

TOLERANCE = 2e-4
"""Of the largest logit, for another order of summation."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"


class Outcome(StrEnum):
    SAME = "the same, which is another than before the change"
    HARMLESS = "the same as before the change"
    REFUSED = "refused by name"
    REFUSED_HARMLESS = "refused by name, although it changes nothing"
    REFUSED_BOTH = "refused by name, and no model to transformers"
    UNJUDGED = "no model to transformers, which is one to mt"
    NAMELESS = "refused without the name of the field"
    SILENT = "read as a model that computes something else"
    SILENT_IN_TRAINING = "read as a model that trains otherwise"
    TRACEBACK = "no MtError"


FAILURES = {Outcome.SILENT, Outcome.SILENT_IN_TRAINING, Outcome.TRACEBACK, Outcome.NAMELESS}
ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")
"""Fields of a class whose loss has that of balance only if logits of routers are asked for: the unchanged case asks."""
SAME_DRAWS_IN_PARTS = {"chunk_size_feed_forward"}
"""Fields by which transformers computes a layer in parts, so that its dropout takes the same random numbers in another
order: training is compared with masks that do not depend on the order."""
WITH_TIES = {"indexer_n_heads"}
"""Fields by whose lower values the scores of several runs of keys are 0: which of them torch.topk chooses depends on
the length of its vector, which for the class is what a position sees and for mt the whole sequence. Where outputs
differ, they are compared with one choice among equals for both."""


@dataclass(frozen=True)
class Passes:
    """Outputs of a model. training: with dropout, from the same seed; None: such a pass is not possible. loss: of the
    pass in training, with that of the routers, for a class that adds it. config: the keys of [model] that mt has read.
    """

    output: Tensor
    training: Tensor | None
    loss: Tensor | None = None
    config: Any = None

    def trains_as(self, other: Passes) -> bool:
        """False where one of both cannot train."""
        if self.training is None or other.training is None or not alike(self.training, other.training):
            return False
        return self.loss is None or other.loss is None or alike(self.loss, other.loss)

    @property
    def draws(self) -> bool:
        """Whether training has dropout or other noise."""
        return self.training is not None and not alike(self.training, self.output)


@dataclass(frozen=True)
class Judged:
    """path: of the field within config.json."""

    case: str
    path: config_values.Path
    value: Any
    outcome: Outcome
    why: str = ""

    def __str__(self) -> str:
        return f"{self.case}: {'.'.join(self.path)}={self.value!r}: {self.outcome} {self.why}"


class Sweep:
    """The folder of a small model, in which one field of config.json after the other is changed.

    Weights depend on their names and shapes alone, so that a change that leaves the shapes leaves the weights.
    """

    def __init__(self, name: str, folder: Path, host: PluginHost) -> None:
        self.name, self.folder, self.host = name, folder, host
        self.case = with_router_loss(with_few_positions(SWEEP_CASES[name]))
        self.kind = class_named(self.case.model)
        model = make_model(self.case)
        self.config, self.base = model.config, folder / "base"
        self.misfits: set[str] = set()
        self._save(model, self.base)
        self.external = json.loads((self.base / CONFIG).read_text())
        self.parsed = type(self.config).from_pretrained(self.base).to_dict()
        self.ours_unchanged: Passes | None = None
        with recorded_reads() as self.read:
            model, self.misfits = self._loaded(self.base)
            self.unchanged = self._theirs(model, self.base)
        self.ours_unchanged = self._ours(self.base)
        self._require_alike()
        self.known = next(
            maps[model.config.model_type]
            for spec in host[MODELS]
            if spec.name == self.case.family
            for maps in [spec.name_maps["hf"].load().model_types]
        )

    def _require_alike(self) -> None:
        """What is refused or harmless says nothing of a case that is not the same before the change."""
        theirs, ours = self.unchanged, self.ours_unchanged
        assert ours is not None
        if not alike(ours.output, theirs.output):
            raise AssertionError(f"{self.name}: mt computes something else from the unchanged model")
        if theirs.training is not None and ours.draws != theirs.draws:
            raise AssertionError(
                f"{self.name}: of the unchanged model transformers draws {theirs.draws}, mt {ours.draws}"
            )

    def changes(self) -> list[tuple[config_values.Path, Any]]:
        config = copy.deepcopy(self.config)
        for part in (config, getattr(config, "text_config", None)):
            # Sizes that differ between layers are read as those that config.json states for all.
            if getattr(part, "is_heterogeneous", False):
                part.allow_global_per_layer_attribute_access = True
        changes = config_values.changes(config, self.known)
        without_towers = self.name in LARGER_CLASSES
        return [(path, value) for path, value in changes if not (without_towers and path[0] in BESIDE_TEXT)]

    def judge(self, path: config_values.Path, value: Any) -> Judged:
        folder = self.folder / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        with without_initial_values():
            outcome, why = self._judged(folder, path, value)
        return Judged(self.name, path, value, outcome, why)

    def _judged(self, folder: Path, path: config_values.Path, value: Any) -> tuple[Outcome, str]:
        external = with_field(self.external, path, value)
        try:
            theirs = self._reference(folder, external)
        except Exception as error:  # whatever transformers raises for what is no model
            theirs, reason = None, f"{type(error).__name__}: {error}"
        try:
            ours = self._ours(folder)
        except MtError as error:
            return self._refusal(theirs, path, str(error))
        except Exception as error:
            # Inputs that do not fit: ids or positions beyond a table, images of another size.
            beyond = isinstance(error, IndexError) and "out of range in self" in str(error)
            unfit = beyond or (theirs is None and "pixel_values" in sweep_inputs(self.case))
            return (Outcome.UNJUDGED if unfit else Outcome.TRACEBACK), f"{type(error).__name__}: {error}"
        if theirs is None:
            return Outcome.UNJUDGED, reason
        if theirs is self.unchanged or path[-1] not in SAME_DRAWS_IN_PARTS:
            outcome = self._compared(theirs, ours, self.unchanged)
            return self._without_ties(folder) if outcome[0] is Outcome.SILENT and path[-1] in WITH_TIES else outcome
        with dropout_by_feature():
            theirs, unchanged = (self._theirs(self._loaded(part)[0], part) for part in (folder, self.base))
        return self._compared(theirs, ours, unchanged)

    def _without_ties(self, folder: Path) -> tuple[Outcome, str]:
        with first_of_equal():
            theirs, unchanged = (self._theirs(self._loaded(part)[0], part) for part in (folder, self.base))
            return self._compared(theirs, self._ours(folder), unchanged)

    def _compared(self, theirs: Passes, ours: Passes, unchanged: Passes) -> tuple[Outcome, str]:
        first, second = without_padding(ours.output, theirs.output.shape[-1]), theirs.output
        if not alike(first, second):
            return Outcome.SILENT, f"by {(first - second).abs().max():.3g}" if first.shape == second.shape else "shape"
        if not alike(second, unchanged.output):
            return Outcome.SAME, ""
        if theirs.training is None:
            return Outcome.HARMLESS, ""
        # Both draw other numbers: what can be compared is whether the changed field acts.
        assert self.ours_unchanged is not None
        changed, also = (not a.trains_as(b) for a, b in ((theirs, unchanged), (ours, self.ours_unchanged)))
        if changed and not also and theirs.loss is not None:
            also = ours.config != self.ours_unchanged.config  # losses of routers are added while gradients are computed
        if changed != also:
            return Outcome.SILENT_IN_TRAINING, f"transformers {'does' if changed else 'does not'}, mt the other"
        return (Outcome.SAME if changed else Outcome.HARMLESS), ""

    def _refusal(self, theirs: Passes | None, path: config_values.Path, why: str) -> tuple[Outcome, str]:
        if theirs is None:
            return Outcome.REFUSED_BOTH, why
        # By its name in config.json under any spelling, or by the key of [model] that it becomes.
        names = {path[-1], self.config.attribute_map.get(path[-1], path[-1]), "model."}
        if not any(name in why for name in names):
            return Outcome.NAMELESS, why
        harmless = alike(theirs.output, self.unchanged.output) and theirs.trains_as(self.unchanged)
        return (Outcome.REFUSED_HARMLESS if harmless else Outcome.REFUSED), why

    def _reference(self, folder: Path, external: dict[str, Any]) -> Passes:
        """What transformers computes, from a folder that it has written but for the changed field."""
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(external))
        shutil.copy(self.base / WEIGHTS, folder)
        parsed = type(self.config).from_pretrained(folder)
        if not changed_fields(parsed.to_dict(), self.parsed) & self.read:
            return self.unchanged
        model, misfits = self._loaded(folder)
        # Of a model that is tied or not the names in memory are the same, and those in the file are not.
        tied, was_tied = (getattr(found, "tie_word_embeddings", None) for found in (model.config, self.config))
        if misfits or tied != was_tied:
            self._save(self.kind(parsed), folder)
            (folder / CONFIG).write_text(json.dumps(external))
            model, _ = self._loaded(folder)
        return self._theirs(model, folder)

    def _save(self, model: nn.Module, folder: Path) -> None:
        """With weights by name."""
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                if tensor.is_floating_point():
                    tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
        model.float().save_pretrained(folder)
        if self.name in LARGER_CLASSES:
            stored = load_file(folder / WEIGHTS)
            save_file({name: stored[name] for name in stored if not is_of_tower(name)}, folder / WEIGHTS)

    def _loaded(self, folder: Path) -> tuple[nn.Module, set[str]]:
        """The model of transformers in fp32, and names of tensors that do not fit it, but for those that never do."""
        model, about = self.kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        names = {str(name) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in about[key]}
        return model, names - self.misfits

    def _theirs(self, model: nn.Module, folder: Path) -> Passes:
        inputs = self._inputs(folder)
        with torch.no_grad():
            output = first_output(model.eval()(**inputs, return_dict=True))
            try:
                trained = self._trained(model.train(), inputs)
            except Exception:  # such as a probability above 1
                return Passes(output, None)
        return Passes(output, first_output(trained), getattr(trained, "loss", None))

    def _trained(self, model: nn.Module, inputs: dict[str, Tensor]) -> Any:
        labels = {"labels": inputs["input_ids"]} if has_router_loss(self.config) else {}
        # The same dropout for the same probabilities.
        torch.manual_seed(0)
        return model(**inputs, **labels, return_dict=True)

    def _ours(self, folder: Path) -> Passes:
        """What mt computes from the same folder."""
        reader = open_checkpoint(folder, self.host)
        config = model_config(reader, self.host)
        before = self.ours_unchanged
        if before is not None and config.model == before.config and same_bytes(folder / WEIGHTS, self.base / WEIGHTS):
            return before
        shapes = {name: layout.shape for name, layout in expected_parameters(config, self.host).items()}
        require_fit(reader, shapes, MODEL)
        model = build_model(config, self.host).eval()
        load_parameters(model.named_parameters(), reader, parameter_layouts(model), MODEL, ParallelContext())
        inputs = as_ours(self.case, self._inputs(folder))
        with torch.no_grad():
            output = our_output(model(**inputs))
            torch.manual_seed(0)
            training = our_output(model.train()(**inputs))
        return Passes(output, training, config=config.model)

    def _inputs(self, folder: Path) -> dict[str, Tensor]:
        external = json.loads((folder / CONFIG).read_text())
        vocabulary = external.get("vocab_size", external.get("text_config", {}).get("vocab_size"))
        side = external.get("image_size", (external.get("vision_config") or {}).get("image_size"))
        inputs = sweep_inputs(self.case)
        if self.case.inputs == "text_with_sound_and_patches":
            inputs |= self._sounds(external)
        if self.case.inputs == "text_with_frames":
            channels = external["audio_config"]["subsampling_conv_channels"]
            return inputs | gemma_frames(channels[0] if isinstance(channels, list) and channels else 16)
        square = "pixel_values" in inputs and case_has_square_images(self.case)
        if square and isinstance(side, int) and 0 < side != inputs["pixel_values"].shape[-1]:
            images = torch.randn(*inputs["pixel_values"].shape[:-2], side, side, generator=torch.manual_seed(3))
            inputs["pixel_values"] = images
        # Without id 0, which pads in some cases. A vocabulary of it alone has no other.
        if not isinstance(vocabulary, int) or vocabulary < 2:
            return inputs
        inputs = {
            name: 1 + (ids - 1) % (vocabulary - 1) if name.endswith("input_ids") else ids
            for name, ids in inputs.items()
        }
        sounding = self.case.inputs == "text_with_sound_and_patches"
        return inputs | {"input_ids": with_starts(inputs["input_ids"], external)} if sounding else inputs

    def _sounds(self, external: dict[str, Any]) -> dict[str, Tensor]:
        """Spectrograms with the mel bins of a changed config.json."""
        bins = external["audio_config"]["num_mel_bins"]
        return {"input_features": reference_features(SOUNDS, bins)[0]} if isinstance(bins, int) and bins > 0 else {}


def is_of_tower(name: str) -> bool:
    return any(part in name for part in ("vision", "visual", "audio", "projector", "patch_merge"))


def without_padding(logits: Tensor, size: int) -> Tensor:
    """Without ids behind the first ones to which a model gives no probability, where transformers leaves them out."""
    return logits[..., :size] if bool((logits[..., size:] == float("-inf")).all()) else logits


def first_output(output: Any) -> Tensor:
    named = [getattr(output, key, None) for key in ("logits", "prediction_logits", "last_hidden_state")]
    return next(tensor for tensor in named if tensor is not None)


def our_output(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    found: Tensor = output.hidden_states if logits is None else logits
    return found


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Names of fields that are read of any configuration of transformers meanwhile: another one can change nothing."""
    kind, names = transformers.PreTrainedConfig, set[str]()
    read = kind.__getattribute__

    def recorded(self: Any, name: str) -> Any:
        names.add(object.__getattribute__(self, "attribute_map").get(name, name))
        return read(self, name)

    kind.__getattribute__ = recorded
    try:
        yield names
    finally:
        kind.__getattribute__ = read


def changed_fields(first: Any, second: Any) -> set[str]:
    """Names of fields, at any depth, in which two contents of config.json differ."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return set()
    names = {name for name in {*first, *second} if first.get(name) != second.get(name)}
    within = (changed_fields(first.get(name), second.get(name)) for name in names)
    return names.union(*within)


def same_bytes(first: Path, second: Path) -> bool:
    return filecmp.cmp(first, second, shallow=False)


def has_router_loss(config: Any) -> bool:
    return all(hasattr(config, key) for key in ROUTER_LOSS)


DYNAMIC = (
    "text_with_patches",
    "text_with_pooled_patches",
    "text_with_sized_images",
    "text_with_rows_of_patches",
    "text_with_sound_and_patches",
)
"""Inputs with images of any size."""


SOUNDS = [sound(SOUND_SAMPLES, seed) for seed in (1, 2)]


def gemma_frames(bins: Any) -> dict[str, Tensor]:
    """Spectrograms of the sounds, which tests/models/test_gemma4_sound.py compares with those of transformers."""
    count = bins if isinstance(bins, int) and bins > 0 else 16
    return {"input_features": torch.stack([gemma_spectrogram(sound, count) for sound in SOUNDS])}


def case_has_square_images(case: Case) -> bool:
    return case.inputs not in DYNAMIC


def with_few_positions(case: Case) -> Case:
    """With fewer positions than the inputs have, where there is no table of them: what changes beyond is seen too."""
    rotary = hasattr(getattr(transformers, case.config)(), "rope_parameters")
    return replace(case, keys={**case.keys, "max_position_embeddings": 8}) if rotary and not case.parts else case


def with_router_loss(case: Case) -> Case:
    found = has_router_loss(getattr(transformers, case.config)())
    # Without experts there are no logits of routers to ask for.
    found = found and case.keys.get("num_local_experts") != 0
    return replace(case, keys={**case.keys, "output_router_logits": True}) if found else case


def with_field(external: dict[str, Any], path: config_values.Path, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(external)
    table = changed
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return changed


def alike(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    largest = second.abs().nan_to_num(0.0).max().item()
    return torch.allclose(first, second, rtol=0.0, atol=TOLERANCE * max(largest, 1e-3), equal_nan=True)


# -- inputs -------------------------------------------------------------------------------------------


def sweep_inputs(case: Case) -> dict[str, Tensor]:
    if case.inputs == "text_with_sound_and_patches":
        return sounds_and_patches(case)
    inputs = inputs_of(case)
    if case.inputs == "text_with_patches":
        inputs["pixel_values"] = patches_of(_cells())
    if case.inputs == "text_with_pooled_patches":
        # [2 images, 2, 3, C, m, p, m, p] -> the patches row by row, with the colours of a pixel side by side
        cells = _cells().reshape(2, 2, 3, 3, 2, 2, 2, 2) * 0.5 + 0.5
        inputs["pixel_values"] = cells.permute(0, 1, 4, 2, 6, 5, 7, 3).reshape(2, 24, 12)
    if case.inputs == "text_with_sized_images":
        # [2 images, 2, 3, C, side, side] -> [2, C, 2 side, 3 side]
        cells = _cells().reshape(2, 2, 3, 3, 4, 4)
        inputs["pixel_values"] = cells.permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 8, 12)
    if case.inputs == "text_with_rows_of_patches":
        # [2 images, 2, 3, C, m, p, m, p] -> the patches row by row, [2 rows m columns m, C, p, p]
        cells = _cells().reshape(2, 2, 3, 3, 2, 2, 2, 2)
        inputs["pixel_values"] = cells.permute(0, 1, 4, 2, 6, 3, 5, 7).reshape(48, 3, 2, 2)
    return inputs


WORDS = 3
"""Before a picture, between it and a sound, and behind that."""


def sounds_and_patches(case: Case) -> dict[str, Tensor]:
    """A picture of 6 cells and a sound in each text."""
    inputs = inputs_of(replace(case, inputs="text_with_sound"))
    tokens = inputs["input_ids"]
    words, sound = tokens[:, -WORDS:], tokens[tokens == AUDIO].view(2, -1)
    start, image = torch.zeros(2, 1, dtype=torch.long), torch.full((2, 6), IMAGE)
    inputs["input_ids"] = torch.cat([words, start, image, words, start, sound, words], 1)
    grids = {"pixel_values": patches_of(_cells()), "image_grid_thw": torch.tensor([[1, 4, 6]] * 2)}
    return inputs | grids | {"attention_mask": torch.ones_like(inputs["input_ids"])}


def with_starts(tokens: Tensor, external: dict[str, Any]) -> Tensor:
    """With the tokens by which the class finds pictures and sounds before each of them, and nowhere else."""
    starts = [external[key] for key in ("vision_start_token_id", "audio_start_token_id")]
    tokens = tokens.where(~torch.isin(tokens, torch.tensor(starts)), 5)
    tokens[:, WORDS], tokens[:, 2 * WORDS + 7] = starts
    return tokens


def _cells() -> Tensor:
    """[12, 3, 4, 4]: squares of two by two patches of two images of 2 x 3."""
    return torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(2))


def patches_of(cells: Tensor) -> Tensor:
    """As the processor of transformers writes them: each frame twice."""
    # [V, C, m, p, m, p] -> [V, m, m, C, p, p]
    patches = cells.reshape(-1, 3, 2, 2, 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches[:, :, :, :, None].expand(-1, -1, -1, -1, 2, -1, -1).reshape(len(cells) * 4, -1)


def as_ours(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    if case.inputs == "two_texts":
        return {"encoder_tokens": inputs["input_ids"], "decoder_tokens": inputs["decoder_input_ids"]}
    if case.inputs == "images":
        return {"images": inputs["pixel_values"]}
    found = {"tokens": inputs["input_ids"]}
    if case.inputs in ("text_with_sound_and_patches", "text_with_frames"):
        found |= {"audio": torch.stack(SOUNDS), "audio_lengths": torch.tensor([[SOUND_SAMPLES]] * 2)}
    if case.inputs in DYNAMIC:
        return {**found, "images": _cells().view(2, 6, 3, 4, 4), "image_grids": torch.tensor([[[2, 3]]] * 2)}
    if "pixel_values" in inputs:
        images = inputs["pixel_values"]
        # [B, M, C, H, W]: M images of a text
        found["images"] = images[:, None] if images.ndim == 4 and case.inputs == "text_with_small_images" else images
    return found


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Layers keep the memory that they get: all of their values come from files, and drawing them costs a third."""
    kinds = (nn.Linear, nn.Embedding)
    drawing = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = lambda self: None
    try:
        yield
    finally:
        for kind, method in zip(kinds, drawing, strict=True):
            kind.reset_parameters = method


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of transformers about values that are varied on purpose."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        yield
    logging.disable(level)

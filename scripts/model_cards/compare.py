"""One small model of `transformers` and the same of mt: outputs, loss, gradients, weights, greedy continuation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from scripts.model_cards.double_precision import double_model, in_double
from scripts.model_cards.greedy import continued, continued_there
from scripts.model_cards.results import DRAWS
from tests.ckpt.config_sweep import SOUNDS, as_ours, first_output, gemma_frames, our_output, quiet, sweep_inputs
from tests.ckpt.family_cases import AUDIO, IMAGE, Case, make_model
from tests.infer.test_families import NO_TOWER
from tests.models.qwen3_omni_reference import reference_features
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.core_model_loading import revert_weight_conversion

from mt_ckpt.hugging_face.tokenizer import special_ids
from mt_core.config.loading import config_from_dict
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.model import SupportsGeneration
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS
from mt_models.hugging_face import HuggingFaceFamily, load_reference, to_reference

Gradients = dict[str, Tensor]
ROUNDING = 1e-5
"""Gradients that differ by more are compared with those of fp64."""
NO_GRADIENT = 1e-9
"""Of the largest gradient of a model in fp64."""


def compare(case: Case, host: PluginHost) -> dict[str, Any]:
    """Errors are relative to the largest value of what is compared (of a gradient: of each parameter by itself)."""
    with quiet():
        theirs = reference_model(case)
        family: HuggingFaceFamily = host[MODELS].get(case.family).name_maps["hf"].load()
        ours, inputs = same_model(theirs, family, host), inputs_there(case)
        with torch.no_grad():
            outputs = our_output(ours(**as_ours(case, inputs))), first_output(theirs(**inputs))
        result: dict[str, Any] = {
            "class": case.model,
            "outputs": largest_error(*outputs),
            "weights": same_weights(case, ours, theirs, family),
        }
        if isinstance(ours, SupportsGeneration) and outputs[1].ndim == 3:
            result["greedy"] = bool(torch.equal(continued(ours, case, inputs), continued_there(theirs, inputs)))
        return result | compare_training(case, (ours, theirs), family)


def reference_model(case: Case) -> nn.Module:
    model, words = make_model(case), sweep_inputs(case).get("input_ids", torch.tensor([]))
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.padding_idx in words:
            # The id of padding is a word of these texts, whose embedding has a gradient as others do.
            module.padding_idx = None
    return model


def inputs_there(case: Case) -> dict[str, Tensor]:
    """Inputs of the class of transformers, with the spectrograms of the sounds that mt reads itself."""
    inputs = sweep_inputs(case)
    if case.inputs == "text_with_sound":
        inputs["input_features"] = reference_features(SOUNDS, case.parts["audio_config"][1]["num_mel_bins"])[0]
    if case.inputs == "text_with_frames":
        inputs |= gemma_frames(case.parts["audio_config"][1]["subsampling_conv_channels"][0])
    return inputs


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def same_model(theirs: nn.Module, family: HuggingFaceFamily, host: PluginHost) -> nn.Module:
    tensors = published(theirs, theirs.state_dict())
    external = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    config = config_from_dict({"model": family.read_config(family.held(external, tensors))}, host)
    context = ModelBuildContext(config, ParallelContext(), host)
    model = host[MODELS].get(family.family).build.load()(config.model, context).eval()
    load_reference(model, tensors, family)
    return model


def published(theirs: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that files have: experts one by one."""
    return revert_weight_conversion(theirs, dict(tensors))


# -- weights -----------------------------------------------------------------------------------------


def same_weights(case: Case, ours: nn.Module, theirs: nn.Module, family: HuggingFaceFamily) -> bool:
    """Whether transformers reads from what mt writes the weights that mt has read, bit for bit."""
    with TemporaryDirectory() as folder:
        config = {**special_ids({}), **family.write_config(ours.config)}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(to_reference(ours, family), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        again, loading = type(theirs).from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    stored, state = theirs.state_dict(), again.state_dict()
    absent = {name for name in stored if name not in state or name in loading["missing_keys"]}
    same = all(torch.equal(state[name], tensor) for name, tensor in stored.items() if name not in absent)
    left_out = all(name.startswith((*NO_TOWER, *case.unused)) for name in absent)
    return same and left_out and not loading["unexpected_keys"]


# -- training ----------------------------------------------------------------------------------------


def compare_training(case: Case, models: tuple[nn.Module, nn.Module], family: HuggingFaceFamily) -> dict[str, Any]:
    """Errors of the loss and of gradients; where these are larger than usual, of both libraries against fp64."""
    trained = Trained.of(case, models, family)
    result: dict[str, Any] = {"loss": trained.loss_error, "gradients": trained.error}
    if trained.error > ROUNDING:
        draws = [trained, *(Trained.of(case, redrawn(models, family, seed), family) for seed in range(1, DRAWS))]
        result["fp64"] = {
            name: exp(fmean(log(draw.exact_error(name)) for draw in draws)) for name in ("mt", "transformers")
        }
    return result


@dataclass(frozen=True)
class Trained:
    """Gradients of the same loss by mt's names: of mt, of transformers, and of transformers in fp64."""

    loss_error: float
    mt: Gradients
    transformers: Gradients
    exact: Gradients

    @classmethod
    def of(cls, case: Case, models: tuple[nn.Module, nn.Module], family: HuggingFaceFamily) -> Trained:
        ours, theirs = models
        inputs, layouts = inputs_there(case), parameter_layouts(ours)
        outputs = our_output(ours(**as_ours(case, inputs))), first_output(theirs(**inputs))
        losses = [trained_loss(model, output, inputs) for model, output in zip(models, outputs, strict=True)]
        mine = {n: layouts[n].to_canonical(p.grad) for n, p in ours.named_parameters() if p.grad is not None}
        expected = gradients_there(theirs, family, ours.config)
        return cls(largest_error(*losses), mine, expected, exact_gradients(theirs, inputs, family, ours.config))

    @property
    def error(self) -> float:
        return self._largest(self.mt, self.transformers)

    def exact_error(self, name: str) -> float:
        return self._largest(getattr(self, name), self.exact)

    def _largest(self, computed: Gradients, expected: Gradients) -> float:
        """Over all parameters but those on which nothing depends, whose gradients are rounding alone: biases of keys,
        and biases that classes share."""
        sizes = {name: gradient.abs().max().item() for name, gradient in self.exact.items()}
        least = NO_GRADIENT * max(sizes.values())
        return max(largest_error(computed[name], expected[name]) for name in self.mt if sizes[name] > least)


def trained_loss(model: nn.Module, output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    model.zero_grad(set_to_none=True)
    value = loss(output, inputs)
    value.backward()
    return value.detach()


def redrawn(models: tuple[nn.Module, nn.Module], family: HuggingFaceFamily, seed: int) -> tuple[nn.Module, nn.Module]:
    """The same models with other weights."""
    ours, theirs = models
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    load_reference(ours, published(theirs, theirs.state_dict()), family)
    return ours, theirs


def loss(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Cross entropy of following words or of classes; of states of a tower, a sum with weights that differ."""
    words = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if words is None:
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        return (output * weights.to(output.dtype)).mean()
    if output.ndim == 2:
        return F.cross_entropy(output, torch.arange(len(output)) % output.shape[1])
    labels = words.masked_fill((words == IMAGE) | (words == AUDIO), -100)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradients_there(theirs: nn.Module, family: HuggingFaceFamily, config: Any) -> Gradients:
    """By mt's names, of each parameter that has one in the class of transformers."""
    state, parameters = theirs.state_dict(), dict(theirs.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items()}
    tensors = {
        name: torch.zeros_like(x) if (gradient := gradients.get(name)) is None else gradient
        for name, x in state.items()
    }
    tensors = {family.spelling(config, name): x for name, x in published(theirs, tensors).items()}
    names = family.name_map(config).reading(tensors)
    # The map is linear, but for what it adds to the weights of some norms.
    added = dict(names.import_value(lambda name: torch.zeros_like(tensors[name])))
    return {name: value - added[name] for name, value in names.import_value(tensors.__getitem__)}


def exact_gradients(theirs: nn.Module, inputs: dict[str, Tensor], family: HuggingFaceFamily, config: Any) -> Gradients:
    model = double_model(theirs)
    with in_double():
        doubled = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        trained_loss(model, first_output(model(**doubled)), inputs)
    return gradients_there(model, family, config)

"""One small model of `transformers` and the same of mt: outputs, gradients, weights, greedy continuation."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from tests.ckpt.config_sweep import Sweep, quiet
from tests.ckpt.family_cases import CASES, Case, inputs_of, make_model
from tests.infer.decoding import cached_logits
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from mt_core.config.loading import config_from_dict
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.model import SupportsGeneration
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS
from mt_models.hugging_face import HuggingFaceFamily, load_reference, to_reference

NEW_TOKENS = 12


def compare(name: str, host: PluginHost) -> dict[str, Any]:
    """Errors are relative to the largest value of what is compared (of a gradient: of each parameter by itself)."""
    case = CASES[name]
    with TemporaryDirectory() as folder, quiet():
        sweep = Sweep(name, Path(folder), host)
        found = {"class": case.model, "outputs": largest_error(sweep._ours(sweep.base), sweep.output)}
        if case.inputs == "tokens":
            found |= compare_in_memory(case, host)
    return found


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def compare_in_memory(case: Case, host: PluginHost) -> dict[str, Any]:
    theirs = make_model(case)
    family = host[MODELS].get(case.family).name_maps["hf"].load()
    ours = same_model(theirs, family, host)
    found: dict[str, Any] = {"weights": same_weights(ours, theirs, family)}
    tokens = inputs_of(case)["input_ids"]
    output = ours(tokens)
    if isinstance(output, Tensor) and output.shape == (logits := theirs(tokens).logits).shape and output.ndim == 3:
        found["gradients"] = gradient_error(ours, theirs, family, (output, logits), tokens)
        if isinstance(ours, SupportsGeneration):
            found["greedy"] = bool(torch.equal(continued(ours, tokens), continued_there(theirs, tokens)))
    return found


def same_model(theirs: nn.Module, family: HuggingFaceFamily, host: PluginHost) -> nn.Module:
    keys = family.read_config(theirs.config.to_dict())
    config = config_from_dict({"model": {**keys, "attention_backend": "eager"}}, host)
    context = ModelBuildContext(config, ParallelContext(), host)
    model = host[MODELS].get(family.family).build.load()(config.model, context).eval()
    load_reference(model, published(theirs, theirs.state_dict()), family)
    return model


def published(theirs: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that files have: experts one by one."""
    return revert_weight_conversion(theirs, dict(tensors))


def same_weights(ours: nn.Module, theirs: nn.Module, family: HuggingFaceFamily) -> bool:
    """Bit for bit, back under the names of files."""
    stored = published(theirs, theirs.state_dict())
    stored = {family.spelling(ours.config, name): tensor for name, tensor in stored.items()}
    back = to_reference(ours, family)
    return all(torch.equal(tensor, stored[name]) for name, tensor in back.items())


def gradient_error(
    ours: nn.Module, theirs: nn.Module, family: HuggingFaceFamily, logits: tuple[Tensor, Tensor], tokens: Tensor
) -> float:
    for one in logits:
        F.cross_entropy(one[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    state, given = theirs.state_dict(), {name: p.grad for name, p in theirs.named_parameters()}
    tensors = {name: torch.zeros_like(x) if given.get(name) is None else given[name] for name, x in state.items()}
    tensors = {family.spelling(ours.config, name): x for name, x in published(theirs, tensors).items()}
    names = family.name_map(ours.config).reading(tensors)
    # The map is linear, but for what it adds to the weights of some norms.
    added = dict(names.import_value(lambda name: torch.zeros_like(tensors[name])))
    expected = {name: value - added[name] for name, value in names.import_value(tensors.__getitem__)}
    layouts = parameter_layouts(ours)
    return max(
        largest_error(layouts[name].to_canonical(p.grad), expected[name])
        for name, p in ours.named_parameters()
        if p.grad is not None and expected[name].abs().max() > 1e-9
    )


@torch.no_grad()
def continued(model: nn.Module, tokens: Tensor) -> Tensor:
    """Greedy, each step from the cache: the prompt in pieces of four, then token by token."""
    length = tokens.shape[1]
    for new in range(NEW_TOKENS):
        ends = [*range(4, length, 4), *range(length, length + new + 1)]
        chosen = cached_logits(model, tokens, ends)[:, -1].argmax(-1)
        tokens = torch.cat([tokens, chosen[:, None]], 1)
    return tokens


@torch.no_grad()
def continued_there(model: Any, tokens: Tensor) -> Tensor:
    # The end-of-text ids of a small model's configuration are those of a large vocabulary.
    model.generation_config.eos_token_id = None
    found: Tensor = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return found

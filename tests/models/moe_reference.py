"""MoE models against `transformers`: what decoder_reference does, with experts, balance losses and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.decoder_reference import Pair, assert_near, load, parameter_count, random_tokens, without_values
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MODELS
from mt_models.hugging_face import HuggingFaceFamily, load_reference, to_reference

MOE_MODELS = (
    "mixtral",
    "qwen_moe",
    "olmoe",
    "deepseek",
    "deepseek_v32",
    "deepseek_v4",
    "glm4_moe_lite",
    "hy_v3",
    "hy_v4",
    "muse_glimmer",
    "muse_spark",
    "inkling",
    "qwen4_exp",
    "kimi_linear",
    "bailing_hybrid",
    "glm5_next",
    "hybrid",
    "mistral4",
    "mistral_large4",
    "longcat_flash",
    "jamba",
    "gpt_oss",
    "granite_moe",
    "minimax_m2",
    "minimax_m3",
    "qwen_next",
    "llama4",
    "olmo_hybrid",
    "dots1",
    "ernie4_5",
    "exaone4",
    "hunyuan",
    "lfm2",
    "afmoe",
    "mimo_v2_flash",
    "step3p7",
)


def published(reference: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a transformers model under the names that it saves: experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(reference, dict(tensors))


def make_pair(host, reference: nn.Module, randomize, backend: str = "eager") -> Pair:
    """Randomize the reference, build ours from its configuration alone, and copy the weights through the name map."""
    reference = reference.float().eval()
    randomize(reference)
    external = reference.config.to_dict()
    family = family_of(host, external["model_type"])
    model = build_from(host, family.read_config(external), backend).eval()
    load_reference(model, published(reference, reference.state_dict()), family)
    return Pair(model, reference, family)


def family_of(host, model_type: str) -> HuggingFaceFamily:
    known = {spec.name: spec for spec in host[MODELS]}
    families = [known[name].name_maps["hf"].load() for name in MOE_MODELS if name in known]
    (family,) = [family for family in families if model_type in family.model_types]
    return family


def build_from(host, keys: Mapping[str, Any], backend: str = "eager") -> nn.Module:
    """The model of a [model] section. Raises ConfigError as a training run would."""
    chosen = [f"model.attention_backend={backend}", "data.seq_length=4", f"model.family={keys['family']}"]
    config = load(host, *chosen, *settings({key: value for key, value in keys.items() if key != "family"}))
    return (
        host[MODELS].get(keys["family"]).build.load()(config.model, ModelBuildContext(config, ParallelContext(), host))
    )


def settings(keys: Mapping[str, Any], section: str = "model") -> list[str]:
    """Overrides for keys of a section and of tables in it."""
    found: list[str] = []
    for key, value in keys.items():
        path = f"{section}.{key}"
        found += settings(value, path) if isinstance(value, Mapping) else [f"{path}={json.dumps(value)}"]
    return found


def assert_same_function(pair: Pair, tokens: Tensor, unused: tuple[str, ...] = ()) -> None:
    """Logits, loss and the gradient of every parameter. unused: endings of names that have no gradient."""
    logits = [pair.ours(tokens), pair.theirs(tokens).logits]
    assert_near(*logits)
    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for x in logits]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    # The map is linear: it carries gradients as it carries weights.
    state = pair.theirs.state_dict()
    given = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    tensors = {name: given[name] if given.get(name) is not None else torch.zeros_like(state[name]) for name in state}
    given_names = spelled(pair, published(pair.theirs, tensors))
    # Files may hold experts in another form than that in which they are written here.
    names = pair.family.name_map(pair.ours.config).reading(given_names)
    expected = dict(names.import_value(given_names.__getitem__))
    layouts = parameter_layouts(pair.ours)
    compared = 0
    for name, parameter in pair.ours.named_parameters():
        if name.endswith(unused) if unused else False:
            continue
        largest = expected[name].abs().max().item()
        assert largest > 0, f"{name} has no effect in the reference"
        assert parameter.grad is not None, name
        actual = layouts[name].to_canonical(parameter.grad)
        torch.testing.assert_close(actual, expected[name], atol=2e-5 * largest + 1e-7, rtol=1e-3, msg=name)
        compared += 1
    assert compared > 10


def spelled(pair: Pair, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of the family's map."""
    return {pair.family.spelling(pair.ours.config, name): tensor for name, tensor in tensors.items()}


def assert_maps_round_trip(pair: Pair) -> None:
    """Tensors bit for bit, and a configuration from which the reference builds the same model."""
    back = to_reference(pair.ours, pair.family)
    state = pair.theirs.state_dict()
    theirs = spelled(pair, published(pair.theirs, state))
    assert set(theirs) - set(back) <= set(pair.family.copies(pair.ours.config))
    for name, tensor in back.items():
        assert torch.equal(tensor, theirs[name]), name
    external = pair.family.write_config(pair.ours.config)
    config = type(pair.theirs.config).from_dict(external, attn_implementation="eager", experts_implementation="eager")
    again = type(pair.theirs)(config).float().eval()
    again.load_state_dict(state)
    tokens = random_tokens(pair.ours.config.vocab_size, 9)
    assert torch.equal(again(tokens).logits, pair.theirs(tokens).logits)
    assert pair.family.read_config(external) == pair.family.read_config(again.config.to_dict())


def expert_tensors(names, marker: str = ".experts.") -> int:
    """How many external tensors belong to experts."""
    return sum(marker in name for name in names)


def assert_same_balance(pair: Pair, tokens: Tensor, balance: nn.Module) -> None:
    """The balance loss of a model with one MoE layer, and its gradient in the router, times the experts of a token.

    The reference does not divide by it: an even load gives k there, 1 here.
    """
    (loss,) = list(auxiliary_losses(pair.ours))
    router, options = pair.ours.decoder.layers[0].mlp.router, pair.ours.config.moe
    topk, (coefficient,) = options["moe_router_topk"], options["moe_aux_loss_coeff"]
    pair.ours.train()
    (0.0 * pair.ours(tokens).sum()).backward()
    theirs = pair.theirs(tokens, output_router_logits=True).aux_loss
    pair.theirs.zero_grad()
    theirs.backward()
    assert loss.take() / coefficient * topk == pytest.approx(theirs.item(), rel=1e-5)
    torch.testing.assert_close(router.weight.grad / coefficient * topk, balance.weight.grad, atol=1e-6, rtol=1e-4)


def assert_active_flops(model: nn.Module, flops: Any, parts: Mapping[str, tuple[str, ...]]) -> None:
    """Each part within 1 % of what torch counts in a forward pass of 2 x 16 tokens. model: of a vocabulary without
    padding, which products have and the model's FLOPs leave out."""
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    for part, endings in parts.items():
        counted = sum(n for name, n in counts.items() if name.endswith(endings))
        assert getattr(flops, part) * tokens.numel() == pytest.approx(counted, rel=0.01), part
    assert flops.forward * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.01)


def assert_presets_match(
    host, family: str, shapes: Mapping[str, tuple[Any, Any, dict[str, Any]]], *overrides: str
) -> None:
    """Every preset of a family has the parameters of the reference built from the published shape.

    shapes: preset -> (configuration type, model type, fields). The reference's expert bias is a buffer.
    """
    from tests.models.decoder_reference import build_preset

    assert set(host[MODELS].get(family).presets.load()) == set(shapes)
    for preset, (config_type, model_type, shape) in shapes.items():
        reference = without_values(model_type, config_type(**shape))
        biases = sum(
            b.numel() for n, b in reference.named_buffers() if n.endswith(("e_score_correction_bias", "expert_bias"))
        )
        ours = parameter_count(build_preset(host, preset, *overrides))
        assert ours == reference.num_parameters() + biases, preset

"""Towers and models of images and text on two tensor-parallel or context-parallel ranks against the same models in one
process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.models.plugin_host import host
from tests.models.vision_reference import config_from, random_images
from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.context_parallel.zigzag import shard_sequence, unshard_sequence
from mt_core.nn.embedding import gather_logits
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.specs import MODELS

pytestmark = pytest.mark.dist

IMAGE, VOCAB = 60, 51
TOWER = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "img_h": 8, "img_w": 8, "patch_dim": 4,
    "init_method_std": 0.2,
}  # fmt: skip
DECODER = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "init_method_std": 0.2}
LLAVA = {"family": "llava", "vocab_size": VOCAB, "image_token_index": IMAGE, "vision_model": TOWER}
CASES = {
    "CLIP": {"family": "vision", **TOWER},
    "SigLIP": {"family": "vision", "vision_model_type": "siglip", **TOWER},
    "classes": {"family": "vision", "num_classes": 3, **TOWER},
    "LLaVA on Llama": {**LLAVA, "language_model": {"family": "llama", "num_query_groups": 2, **DECODER}},
    "LLaVA on GPT": {
        **LLAVA,
        "language_model": {"family": "gpt", "max_position_embeddings": 16, **DECODER},
        "vision_projection_type": "affine",
    },
    "SmolVLM": {
        "family": "smolvlm",
        "vocab_size": VOCAB,
        "image_token_index": IMAGE,
        "vision_model": {**TOWER, "vision_model_type": "siglip", "add_pooler": False, "patch_dim": 2},
        "language_model": {"family": "llama", "num_query_groups": 2, **DECODER},
        "scale_factor": 2,
    },
    "InternVL": {
        "family": "internvl",
        "vocab_size": VOCAB,
        "image_token_index": IMAGE,
        "vision_model": {**TOWER, "vision_model_type": "internvit", "patch_dim": 2},
        "language_model": {"family": "qwen", "num_query_groups": 2, **DECODER},
    },
}
OF_TEXTS = [name for name, keys in CASES.items() if "language_model" in keys]


def output(model: nn.Module, case: str, ctx: ParallelContext) -> Tensor:
    """What the model computes, whole on every rank."""
    images = random_images(2, 3, 8, 8)
    if case in OF_TEXTS:
        tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(3))
        tokens[0, 6:10] = IMAGE  # across the border between the halves of a sharded sequence
        tokens[1, 2:6] = IMAGE  # across the border between chunks of context-parallel ranks
        positions = torch.arange(16).expand(2, 16)
        own = [shard_sequence(x, 1, ctx.cp) for x in (tokens, positions)]
        return model(own[0], images, own[1])
    out = model(images)
    return out if isinstance(out, Tensor) else out.pooled


def forward_backward(case: str, ctx: ParallelContext) -> tuple[Tensor, nn.Module]:
    """The output, and the model with gradients as the data-parallel step would see them."""
    sections = {"train": {"loss": "classification"}} if case == "classes" else {}
    config = config_from(host(), CASES[case], data={"seq_length": 16}, **sections)
    model = host()[MODELS].get(config.model.family).build.load()(config.model, ModelBuildContext(config, ctx, host()))
    initialize(model, 1, ctx)
    out = output(model, case, ctx)
    if case in OF_TEXTS:
        weights = torch.randn(2, 16, VOCAB, generator=torch.Generator().manual_seed(4))
        weights = shard_sequence(weights, 1, ctx.cp)
        own = model.language_model.embedding.word_embeddings.range
        (out * weights[..., own.start : own.stop]).sum().backward()
        out = gather_logits(out.detach(), VOCAB, config.model.make_vocab_size_divisible_by, ctx)
        out = unshard_sequence(out, 1, ctx.cp)
    else:
        weights = torch.randn(*out.shape[:-1], VOCAB, generator=torch.Generator().manual_seed(4))
        (out * weights[..., : out.shape[-1]]).sum().backward()
    layouts = parameter_layouts(model)
    for name, parameter in model.named_parameters():
        for axis in (*layouts[name].partial_gradient, "cp"):
            if parameter.grad is not None and ctx.axis(axis).size > 1:
                parameter.grad = all_reduce(parameter.grad, ctx.axis(axis))
    return out.detach(), model


@cache
def in_one_process(case: str) -> tuple[Tensor, nn.Module]:
    return forward_backward(case, ParallelContext())


LAYOUTS = {"tp": (AxisSizes(tp=2), False), "sequence": (AxisSizes(tp=2), True), "cp": (AxisSizes(cp=2), False)}


def differences(rank: int, world_size: int, layout: str) -> dict[str, float]:
    """Of outputs and of this rank's slice of every gradient, in units of the largest value."""
    sizes, sequence_parallel = LAYOUTS[layout]
    sharded = build_parallel_context(sizes, sequence_parallel=sequence_parallel)
    found = {}
    for case in CASES:
        if layout != "tp" and case not in OF_TEXTS:
            continue
        out, model = forward_backward(case, sharded)
        expected, whole = in_one_process(case)
        found[f"{case}: output"] = relative(out, expected)
        layouts, reference = parameter_layouts(model), dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            if reference[name].grad is None:
                assert parameter.grad is None, name
                continue
            canonical = parameter_layouts(whole)[name].to_canonical(reference[name].grad)
            found[f"{case}: {name}"] = relative(parameter.grad, layouts[name].to_local(canonical, sharded))
    return found


def relative(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


RUNS = InTurn(differences, [(2, layout) for layout in LAYOUTS])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_compute_the_outputs_and_gradients_of_one(layout) -> None:
    for found in RUNS.of_ranks(2, layout):
        assert len(found) > 50
        wrong = {name: difference for name, difference in found.items() if difference > 5e-5}
        assert not wrong

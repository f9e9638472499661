"""Families beside decoders through pipeline stages: BERT's heads and T5's two stacks, against the whole model."""

from __future__ import annotations

import pytest
import torch

from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.nn.layout import parameter_layouts
from mt_core.optim.finalize_grads import GradFinalizer, find_tied_weights
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import build
from mt_core.train.pipelining import Pipelining, build_stages

pytestmark = pytest.mark.dist

SHARED = [
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.vocab_size=61",
    "model.attention_dropout=0.0",
    "tokenizer.tokenizer_type=NullTokenizer",
    "tokenizer.vocab_size=60",
    "train.train_iters=1",
    "train.micro_batch_size=2",
]
MODELS = {
    "bert, norms before": ["model.family=bert", "model.num_layers=3", "model.max_position_embeddings=16"],
    "bert, norms behind": [
        "model.family=bert",
        "model.num_layers=2",
        "model.max_position_embeddings=16",
        "model.layernorm_placement=post",
    ],
    "modernbert": ["model.family=modernbert", "model.num_layers=4", "model.local_attention=4"],
    "t5, relative bias": ["model.family=t5", "model.num_layers=2", "model.decoder_num_layers=3"],
    "umt5": [
        *("model.family=t5", "model.num_layers=2", "model.decoder_num_layers=3"),
        "model.relative_attention_bias_per_layer=true",
    ],
    "bart": [
        *("model.family=bart", "model.num_layers=3", "model.decoder_num_layers=2", "model.max_position_embeddings=16"),
    ],
    "mbart": [
        "model.family=bart",
        "model.num_layers=2",
        "model.max_position_embeddings=16",
        "model.layernorm_placement=pre",
    ],
    "t5, learned positions, tied": [
        "model.family=t5",
        "model.num_layers=3",
        "model.position_embedding_type=learned_absolute",
        "model.max_position_embeddings=16",
        "model.untie_embeddings_and_output_weights=false",
    ],
}


def batches(family: str, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 60, (count, 2, 2, 12), generator=generator)
    if family.endswith("bert"):
        return [{"tokens": x[0], "labels": x[1]} for x in ids]
    return [{"encoder_tokens": x[0], "decoder_tokens": x[1, :, :7], "labels": x[0, :, :7]} for x in ids]


def loss(output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of all heads that there are."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    if isinstance(output, torch.Tensor) or output.binary_logits is None:
        return losses
    return losses + output.binary_logits.square().mean()


def differences(rank: int, world: int, name: str, schedule: str, count: int) -> dict[str, float]:
    """Relative differences of the loss and of each gradient of this rank's parameters."""
    torch.set_num_threads(1)
    host = load_plugins()
    # ModernBERT has none beside that of attention.
    dropout = [] if name == "modernbert" else ["model.hidden_dropout=0.0"]
    settings = [*SHARED, *dropout, *MODELS[name], f"parallel.pipeline_model_parallel_size={world}"]
    settings += [f"parallel.pipeline_schedule={schedule}", "data.dataset_type=mock", "data.seq_length=12"]
    with as_world(world):
        config = load_config(overrides=settings, host=host).config
    whole = build.build_initialized_model(config, ParallelContext(), host)
    data = batches(config.model.family, count)
    total = sum(loss(whole(**{key: batch[key] for key in whole.inputs if key in batch}), batch) for batch in data)
    total.backward()

    ctx = build.build_context(config, torch.device("cpu"))
    stages = build_stages(config, ctx, host)
    assert stages is not None
    model = build.build_initialized_model(config, ctx, host, stages.own)
    found = Pipelining(model, stages, loss, ctx).forward_backward(data, lambda losses, batch: losses)
    copies = find_tied_weights([key for key, _ in model.named_parameters()], ctx)
    named = [(key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad]
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    GradFinalizer(parameter_layouts(model), ctx, copies, sharded=False).finalize_model_grads(named)
    reference = {key: parameter.grad for key, parameter in whole.named_parameters()}
    off = {key: ((p.grad - reference[key]).norm() / reference[key].norm().clamp(min=1e-8)).item() for key, p in named}
    if stages.own[-1].last:
        off["loss"] = abs(found.item() / total.item() - 1)
    return off


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("world", "schedule"), [(2, "1f1b"), (2, "zbv_zero_bubble"), (4, "1f1b")])
def test_stages_compute_what_the_whole_model_does(name, world, schedule) -> None:
    found = run_ranks(world, differences, name, schedule, 3)
    assert any("loss" in rank for rank in found)
    assert {key: off for rank in found for key, off in rank.items() if off > 1e-5} == {}

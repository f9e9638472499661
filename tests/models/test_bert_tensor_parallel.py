"""BERT, T5 and a classifier sharded over tensor-parallel ranks: the loss and every gradient of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.dist.in_turn import InTurn
from tests.models.bert_reference import bert_batch
from tests.models.plugin_host import host
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import DropoutStreams, use_streams
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.specs import LOSSES, MODELS

pytestmark = pytest.mark.dist
SIZES = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "vocab_size=101", "init_method_std=0.2"]
SIZES += ["attention_dropout=0"]
POSITIONS = "max_position_embeddings=16"
CASES = {
    "BERT": ("bert", "bert", [POSITIONS]),
    "post-norm BERT": ("bert", "bert", [POSITIONS, "layernorm_placement=post"]),
    "ModernBERT": ("modernbert", "bert", [POSITIONS, "local_attention=6", "global_attn_every_n_layers=2"]),
    "T5": ("t5", "cross_entropy", ["scale_attention_scores=true"]),
    "T5 1.1": ("t5", "cross_entropy", ["untie_embeddings_and_output_weights=true", "activation=geglu_tanh"]),
    "Megatron's T5": (
        "t5",
        "cross_entropy",
        [
            POSITIONS,
            "position_embedding_type=learned_absolute",
            "normalization=LayerNorm",
            "add_bias_linear=true",
            "scale_output=false",
            "add_output_bias=true",
        ],
    ),
    "UMT5": ("t5", "cross_entropy", ["relative_attention_bias_per_layer=true"]),
    "BART": ("bart", "cross_entropy", [POSITIONS, "scale_embedding=true"]),
    "mBART": ("bart", "cross_entropy", [POSITIONS, "layernorm_placement=pre"]),
    "classes on BERT": ("bert_classification", "classification", [POSITIONS, "classifier_dropout=0.5"]),
    "classes on ModernBERT": ("modernbert_classification", "classification", ["classifier_pooling=mean"]),
    "classes on GPT": ("gpt_classification", "classification", [POSITIONS, "classifier_dropout=0.5"]),
}


def samples() -> dict[str, Tensor]:
    """Arrays for all of them: 12 positions, which two ranks divide."""
    batch = {name: value[:, :12] if value.ndim == 2 else value for name, value in bert_batch().items()}
    sides = {"encoder_tokens": batch["tokens"], "decoder_tokens": batch["tokens"].flip(1)}
    return batch | sides | {"encoder_mask": batch["padding_mask"]}


def loss_and_gradients(case: str, ctx: ParallelContext) -> tuple[Tensor, nn.Module]:
    """The model after backward; its partial gradients are summed."""
    family, loss, keys = CASES[case]
    # ModernBERT has no dropout beside that of attention.
    sizes = SIZES if family.startswith("modernbert") else [*SIZES, "hidden_dropout=0"]
    options = [f"model.family={family}", f"train.loss={loss}", *(f"model.{key}" for key in (*sizes, *keys))]
    config = load_config(overrides=[*options, "data.seq_length=12", "train.train_iters=1"], host=host()).config
    model = host()[MODELS].get(family).build.load()(config.model, ModelBuildContext(config, ctx, host()))
    initialize(model, 5, ctx)
    use_streams(model, DropoutStreams(5))
    batch = samples()
    if "class" in loss:
        batch["labels"], batch["loss_mask"] = torch.tensor([1, 0, 1, 1]), torch.ones(4)
    output = model(**{name: batch[name] for name in model.inputs if name in batch})
    losses = host()[LOSSES].get(loss, key="train.loss").build.load()(config, ctx)(output, batch)
    total = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    total.backward()
    for name, layout in parameter_layouts(model).items():
        if "tp" in layout.partial_gradient and ctx.tp.size > 1:
            dist.all_reduce(model.get_parameter(name).grad, group=ctx.tp.group)
    return total.detach(), model


def differences(rank: int, world: int, case: str) -> list[tuple[float, float, list[str]]]:
    """Without and with sequence parallelism: both losses, and the names of gradients that differ from this rank's slice
    of the whole model's."""
    expected, whole = loss_and_gradients(case, ParallelContext())
    return [compared(world, case, sharded, expected, whole) for sharded in (False, True)]


def compared(
    world: int, case: str, sequence_parallel: bool, expected: Tensor, whole: nn.Module
) -> tuple[float, float, list[str]]:
    ctx = build_parallel_context(AxisSizes(tp=world), sequence_parallel=sequence_parallel)
    loss, model = loss_and_gradients(case, ctx)
    layouts, single = parameter_layouts(model), parameter_layouts(whole)
    wrong = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        canonical = single[name].to_canonical(whole.get_parameter(name).grad)
        slice_ = layouts[name].to_local(canonical, ctx)
        if not torch.allclose(parameter.grad, slice_, atol=1e-6 + 2e-5 * canonical.abs().max().item(), rtol=1e-4):
            wrong.append(f"{name}: {(parameter.grad - slice_).abs().max():.2e} of {slice_.abs().max():.2e}")
    return loss.item(), expected.item(), wrong


RUNS = InTurn(differences, [(2, case) for case in CASES])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_loss_and_gradients_of_one(case) -> None:
    for of_rank in RUNS.of_ranks(2, case):
        assert len(of_rank) == 2
        for loss, expected, wrong in of_rank:
            assert loss == pytest.approx(expected, rel=1e-5)
            assert not wrong

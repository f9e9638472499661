"""Plans against formulas worked out by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

sys.path.insert(0, str(Path(__file__).parent))

from cases import EXPERTS, LLAMA, MODEL, PP, TP, built, planned, tree

from mt_core._torch_compat import UncompiledDispatchMode
from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.interfaces import SampleField
from mt_core.optim.muon import orthogonalize
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import whole
from mt_core.plugins import load_plugins
from mt_core.specs import DATASETS
from mt_tools.plan.activations import StageCost
from mt_tools.plan.layout_search import QuickPlanner, search, weights_gib
from mt_tools.plan.layouts import LayoutPlan, Planner
from mt_tools.plan.ledger import Flow, sent_bytes
from mt_tools.plan.machines import GIB, get_machine
from mt_tools.plan.stages import empty_batch
from mt_tools.plan.timing import Clock
from mt_tools.plan.weights import WeightCost, newton_schulz_bytes

GPT3 = Path(__file__).parents[3] / "examples" / "gpt3-175b.toml"


@pytest.fixture(scope="module")
def gpt3() -> LayoutPlan:
    host = load_plugins()
    with as_world(1024):
        config = load_config(GPT3, host=host).config
    return Planner(config, host, get_machine("h100")).plan(config, 1024)


H, LAYERS, VOCAB, POSITIONS, TENSOR, STAGES = 12288, 6, 50257, 2048, 8, 16


def layer_parameters() -> int:
    """Of one layer on one of 8 tensor-parallel ranks: matrices sharded; norms and biases behind them are not."""
    qkv, proj = (3 * H * H + 3 * H) // TENSOR, H * H // TENSOR + H
    mlp = (4 * H * H + 4 * H) // TENSOR + 4 * H * H // TENSOR + H
    return qkv + proj + mlp + 4 * H


def token_embeddings() -> int:
    padded = -(-VOCAB // (128 * TENSOR)) * 128 * TENSOR
    return padded // TENSOR * H


@pytest.mark.slow
def test_gpt3_has_the_parameters_of_the_formula_on_each_rank(gpt3: LayoutPlan) -> None:
    of_rank = {rank: row.weights.parameters for row in gpt3.ranks for rank in row.pp_ranks}
    middle = LAYERS * layer_parameters()
    assert of_rank[0] == middle + token_embeddings() + POSITIONS * H
    assert all(of_rank[rank] == middle for rank in range(1, STAGES - 1))
    assert of_rank[STAGES - 1] == middle + token_embeddings() + 2 * H  # the tied copy, and the last norm
    assert sum(row.count for row in gpt3.ranks) == 1024


def test_gpt3_holds_the_bytes_of_the_distributed_optimizer(gpt3: LayoutPlan) -> None:
    """6 + 10 / d for each parameter in bf16 with remainders, d = 8, beside 4 bytes of a step count for each tensor and
    what aligns tensors in buckets."""
    for row in gpt3.ranks:
        assert row.weights.total == pytest.approx(row.weights.parameters * (6 + 10 / 8), rel=1e-4)
        assert row.weights.total >= row.weights.parameters * (6 + 10 / 8)


def test_gpt3_keeps_the_activations_of_korthikanti(gpt3: LayoutPlan) -> None:
    """34 s b h / t bytes a layer with sequence parallelism and selective recomputation (arXiv:2205.05198), for the 16
    micro-batches that the first of 16 stages has in flight; and a byte for the dropout of the embedding."""
    first = next(row for row in gpt3.ranks if 0 in row.pp_ranks)
    assert first.in_flight == STAGES
    assert first.activation_bytes == pytest.approx((34 * LAYERS + 1) * 2048 * H / TENSOR * STAGES, rel=0.01)


def test_gpt3_needs_the_flops_of_the_formula(gpt3: LayoutPlan) -> None:
    """6 for each weight of a product, and the causal half of the scores."""
    products = 6 * (96 * 12 * H * H + H * VOCAB) + 6 * 96 * 2048 * H
    assert gpt3.flops_per_token == pytest.approx(products, rel=1e-3)
    assert gpt3.flops_per_step == gpt3.flops_per_token * 1536 * 2048


def test_gpt3_waits_for_its_pipeline_as_the_closed_form_says(gpt3: LayoutPlan) -> None:
    """(p - 1) / (m + p - 1) for even stages; the last one is a little longer here, so that the others wait more."""
    assert gpt3.micro_batches == 1536 // 8
    even = (STAGES - 1) / (gpt3.micro_batches + STAGES - 1)
    assert even < gpt3.bubble < even + 0.06


def test_gpt3_ramps_up_its_batch(gpt3: LayoutPlan) -> None:
    sizes = [size for size, _ in gpt3.ramp_up]
    assert sizes == list(range(16, 1537, 16))
    samples = sum(size * steps for size, steps in gpt3.ramp_up if size < 1536)
    assert samples == pytest.approx(5859375, abs=1536)


@pytest.mark.slow
def test_a_long_stage_costs_what_its_layers_cost_together() -> None:
    """Layers alike are measured twice and multiplied: the same as running all of them. So are two kinds in turn."""
    mixed = {**LLAMA, "num_layers": 6, "moe": {**EXPERTS, "moe_layer_freq": "[1,0,0,1,1,0]"}}
    for model in ({**LLAMA, "num_layers": 6}, mixed):
        config = built(tree(model), 1)
        costs = Planner(config, load_plugins(), get_machine("h100")).stage_costs(config, 1)
        assert_alike(costs.of(whole(6)), costs._measured(whole(6))[0])


def assert_alike(multiplied: StageCost, run: StageCost) -> None:
    # The output holds a few numbers in each run that nothing saves.
    assert multiplied.kept == pytest.approx(run.kept, rel=0, abs=64)
    for part in ("forward", "backward", "gradients"):
        assert getattr(multiplied.temporary, part) == pytest.approx(getattr(run.temporary, part), rel=1e-3)
    assert multiplied.forward == run.forward
    assert multiplied.backward == run.backward


def test_a_step_takes_longer_with_more_to_compute_and_less_is_kept_with_recomputation() -> None:
    plain, full = planned(tree(), 1), planned(tree(recompute={"recompute_granularity": "full"}), 1)
    assert full.seconds > plain.seconds
    assert full.ranks[0].activation_bytes < plain.ranks[0].activation_bytes
    assert full.ranks[0].total < plain.ranks[0].total
    assert full.flops_per_token == plain.flops_per_token
    # By hand, for a token: 4 layers of 12 h^2 weights and the causal half of 32 keys, and the logits of 261 ids
    # and their padding. Nothing keeps the result of the last matrix of a layer (4 h^2), so that computing again stops
    # before it.
    scores, logits = 2 * 32 * 32, 2 * 32 * 384
    forward = 4 * (2 * 12 * 32**2 + scores) + logits
    again = 4 * (2 * 8 * 32**2 + scores)
    tokens = 8 * 32
    assert plain.ranks[0].flow.flops == 3 * forward * tokens
    assert full.ranks[0].flow.flops == (3 * forward + again) * tokens


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("device", "kernel", "mask", "masks_of_layer"),
    [("cpu", "auto", 4, 2), ("cuda", "torch", 1, 2), ("cuda", "auto", 1, 0)],
)
def test_dropout_keeps_what_the_device_keeps_also_when_computed_again(
    backend: str, granularity: str, device: str, kernel: str, mask: int, masks_of_layer: int
) -> None:
    """A mask, or the seed of 8 bytes of a kernel that draws it again."""
    values = tree({**MODEL, "attention_backend": backend}, recompute={"recompute_granularity": granularity})
    values["train"]["device"] = device
    values["kernels"] = {"bias_dropout_add": kernel}
    plain = planned(values, 1).ranks[0].activation_bytes
    values["model"]["hidden_dropout"] = 0.1
    # After the embedding, and twice in each of 4 layers where layers keep what they compute.
    layers = 0 if granularity == "full" else 4
    seeds = 2 * layers * 8 if masks_of_layer == 0 else 0
    kept = (1 + layers * masks_of_layer) * mask * 2 * 32 * 32 + seeds
    assert planned(values, 1).ranks[0].activation_bytes - plain == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{"family": "gemma", "attn_logit_softcapping": 50.0}, {"family": "gpt_oss", "moe": EXPERTS}]
)
def test_a_backend_for_soft_caps_and_sinks_is_planned_as_auto_takes_it(keys: dict[str, Any]) -> None:
    """Scores are kept on a CPU, by eager, and not on a GPU, by flex."""

    def kept(device: str, backend: str) -> float:
        values = tree({**LLAMA, "num_layers": 1, **keys, "attention_backend": backend})
        values["train"]["device"] = device
        return planned(values, 1).ranks[0].activation_bytes

    assert kept("cpu", "auto") == kept("cpu", "eager")
    assert kept("cuda", "auto") == kept("cuda", "flex") < kept("cuda", "eager")


LLAMA_7B = {
    "family": "llama",
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "attention_backend": "flash_attn_2",
}


def kept_by_a_llama_layer(kernels: dict[str, str]) -> float:
    values = tree(LLAMA_7B, precision={"dtype": "bf16"})
    values["train"] |= {"device": "cuda", "micro_batch_size": 1, "global_batch_size": 1}
    values["data"] = {"dataset_type": "mock", "seq_length": 4096}
    values["kernels"] = kernels
    config = built(values, 1)
    costs = Planner(config, load_plugins(), get_machine("h100")).stage_costs(config, 1)
    return costs.of(whole(2)).kept_bytes - costs.of(whole(1)).kept_bytes


def test_a_llama_layer_keeps_what_its_kernels_keep() -> None:
    """In bf16, of s tokens: inputs and results of two norms, queries, keys and values, which do not share the memory of
    their product, the result of attention, the gate and the other half, and their product; in fp32 a number for each
    row of a norm and of each head's attention."""
    s, h, f, heads = 4096, 4096, 11008, 32
    fused = 2 * s * (2 * 2 * h + 3 * h + h + 3 * f) + 4 * s * (2 + heads)
    assert kept_by_a_llama_layer({}) == pytest.approx(fused, rel=0.001)
    written_out = kept_by_a_llama_layer(dict.fromkeys(("rms_norm", "rotary", "activation"), "torch"))
    assert written_out > 1.4 * fused


def test_collecting_weights_costs_what_the_forward_pass_does_not_hide() -> None:
    """The embedding is waited for, and what takes longer to collect than to compute with."""

    def end(**parallel: object) -> float:
        values = tree(parallel={"use_distributed_optimizer": True, "ddp_bucket_size": 1, **parallel})
        return planned(values, 2).time.end

    alone, overlapped = end(), end(overlap_param_gather=True)
    assert 0 < overlapped < alone
    clock = Clock(get_machine("h100"), {"dp_cp": 2, "tp": 1, "etp": 1, "ep": 1, "world": 2, "pp": 1})
    step = Flow(0.0, {("dp", "all_gather"): 9e9}, {("dp", "all_gather"): 3})
    cost, config = WeightCost(step=step, collected_first=0.25), built(tree(parallel={"overlap_param_gather": True}), 1)
    whole_time = clock.messages(step)
    assert clock.step_end(config, cost, forward=0.0, backward=0.0) == pytest.approx(whole_time)
    assert clock.step_end(config, cost, forward=whole_time / 2, backward=0.0) == pytest.approx(whole_time / 2)
    assert clock.step_end(config, cost, forward=whole_time * 9, backward=0.0) == pytest.approx(whole_time / 4)


def test_offloaded_layers_keep_nothing_on_the_device() -> None:
    plain, one = (planned(tree(recompute={"cpu_offloading_num_layers": count}), 1).ranks[0] for count in (0, 1))
    (two,) = planned(tree(recompute={"cpu_offloading_num_layers": 2}), 1).ranks
    first = plain.activation_bytes - one.activation_bytes
    assert first > 0
    assert one.activation_bytes - two.activation_bytes == first


@pytest.mark.parametrize(
    ("operation", "sent"), [("all_reduce", 1500), ("all_gather", 750), ("reduce_scatter", 750), ("send", 1000)]
)
def test_ring_algorithms_send_the_known_bytes(operation: str, sent: float) -> None:
    assert sent_bytes(operation, 1000, 4) == sent


@pytest.mark.slow
def test_a_search_gives_layouts_that_fit_fastest_first() -> None:
    config = built(tree({**LLAMA}), 1)
    planner = QuickPlanner(config, load_plugins(), get_machine("h100"))
    roomy = search(planner, 8, 1.0)
    seconds = [candidate.plan.seconds for candidate in roomy.candidates]
    assert seconds == sorted(seconds)
    assert roomy.candidates
    assert not roomy.too_large
    tight = max(candidate.plan.memory_gib for candidate in roomy.candidates) * 0.6
    found = search(planner, 8, tight)
    assert found.candidates
    assert found.too_large
    assert all(candidate.plan.memory_gib <= tight for candidate in found.candidates)
    assert any("does not fit" in reason for reason in found.refused)  # 8 ranks for 4 heads


@pytest.mark.parametrize(
    ("recipe", "bytes_of_hidden", "bytes_of_inner"),
    [(None, 2, 2 * 2 + 2), ("tensorwise", 1, 2 * 2 + 1), ("delayed", 1, 2 * 2 + 1), ("blockwise", 2, 2 * 2)],
)
def test_a_feed_forward_in_fp8_keeps_fewer_bytes(recipe: str | None, bytes_of_hidden: int, bytes_of_inner: int) -> None:
    """The input, the gate and the up-projection, and what the second product takes: in 16 bits, in FP8, or by blocks
    computed again."""
    hidden, inner, tokens = 128, 256, 2 * 32
    fp8 = {} if recipe is None else {"fp8_format": "hybrid", "fp8_recipe": recipe, "fp8_min_features": 1}
    values = tree({**LLAMA, "hidden_size": hidden, "ffn_hidden_size": inner}, precision={"dtype": "bf16", **fp8})
    values["train"]["device"] = "cuda"
    config = built(values, 1)
    planner = Planner(config, load_plugins(), get_machine("h100"))
    plan = planner.plan(config, 1)
    kept = plan.largest.activations["feed_forward"] / LLAMA["num_layers"]  # type: ignore[operator]
    assert kept == pytest.approx(tokens * (hidden * bytes_of_hidden + inner * bytes_of_inner), rel=2e-4)
    assert plan.flops_per_token > 6 * 4 * (3 * hidden**2 + 3 * hidden * inner)


@pytest.mark.parametrize(
    "keys",
    [
        {"precision": {"dtype": "bf16", "accumulate_allreduce_grads_in_fp32": False}},
        {"precision": {"dtype": "bf16"}, "optimizer": {"optimizer": "sgd"}},
        {"precision": {"dtype": "bf16"}, "optimizer": {"optimizer": "lion"}},
        {"optimizer": {"exp_avg_dtype": "bf16"}},
        {"precision": {"dtype": "bf16"}},
        {},
    ],
    ids=str,
)
def test_what_a_search_prunes_has_no_room_for_its_weights(keys: dict[str, Any]) -> None:
    """The bound is the weights' memory of the plan, but for padding (this vocabulary has none) and step counts."""
    llama = {**LLAMA, "vocab_size": 384}
    planner = QuickPlanner(built(tree(llama, **keys), 1), load_plugins(), get_machine("h100"))
    parallel = {PP: 1, TP: 1, "expert_tensor_parallel_size": None, "expert_model_parallel_size": 1}
    config = built(tree(llama, **keys, parallel={"use_distributed_optimizer": True}), 4)
    planned = planner.plan(config, 4).largest.weights.total / GIB
    assert 0.95 * planned < weights_gib(planner, {"parallel": parallel}, 4) <= planned


class LargestLive(UncompiledDispatchMode):
    """Bytes of the storages that operators made and that lived at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._made = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage()
        self._made[StorageWeakRef(storage)] = storage.nbytes()
        del storage
        self._made = {reference: size for reference, size in self._made.items() if not reference.expired()}
        self.bytes = max(self.bytes, sum(self._made.values()))
        return out


@pytest.mark.parametrize("shape", [(128, 512), (512, 128), (128, 128)])
def test_an_update_of_muon_takes_the_memory_of_its_largest_matrix(shape: tuple[int, int]) -> None:
    with LargestLive() as largest:
        orthogonalize(torch.ones(shape) + 0.0, 2, "simple")
    assert newton_schulz_bytes(*shape) == pytest.approx(largest.bytes, rel=0.01)


def test_memory_of_muons_update_is_planned_where_activations_are_smaller() -> None:
    values = tree({**LLAMA, "hidden_size": 128}, optimizer={"optimizer": "muon"})
    values["data"]["seq_length"], values["train"]["micro_batch_size"] = 8, 1
    config = built(values, 1)
    rank = Planner(config, load_plugins(), get_machine("h100")).plan(config, 1).largest
    inner = config.model.ffn_size
    assert rank.total - rank.weights.total == newton_schulz_bytes(2 * inner, 128) > rank.activation_bytes


def test_a_quick_plan_is_the_whole_one_for_long_steps() -> None:
    """A part of a step with many micro-batches is simulated, and extrapolated."""
    values = tree(parallel={PP: 2})
    values["train"].update(micro_batch_size=1, global_batch_size=64)
    config = built(values, 2)
    whole, quick = (
        kind(config, load_plugins(), get_machine("h100")).plan(config, 2) for kind in (Planner, QuickPlanner)
    )
    assert quick.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert quick.bubble == pytest.approx(whole.bubble, rel=1e-3)
    assert [row.total for row in quick.ranks] == [row.total for row in whole.ranks]


def test_a_quick_plan_does_not_multiply_what_the_loss_holds_whatever_the_samples() -> None:
    """The gradient of the LM head, and logits, of which 128 tokens are a chunk at least."""
    values = tree({**LLAMA, "vocab_size": 50000}, precision={"dtype": "bf16"})
    values["train"] |= {"micro_batch_size": 4, "device": "cuda", "loss": "linear_cross_entropy_sum"}
    config = built(values, 1)
    whole, quick = (
        kind(config, load_plugins(), get_machine("h100")).plan(config, 1).largest for kind in (Planner, QuickPlanner)
    )
    assert quick.total == pytest.approx(whole.total, rel=0.01)


def test_an_unknown_field_of_a_shape_is_refused() -> None:
    spec = replace(
        load_plugins()[DATASETS].get("mock"), sample=(SampleField("image", "float32", "[rows, columns]", ""),)
    )
    host = {DATASETS: SimpleNamespace(get=lambda name, key: spec)}
    with pytest.raises(ConfigError, match=r'field image \[rows, columns\] of data.dataset_type=mock is.*number "rows"'):
        empty_batch(built(tree(), 1), host, ParallelContext())


def test_a_question_has_its_passages() -> None:
    data = {"dataset_type": "dpr", "data_path": ["none"], "seq_length": 16, "train_hard_neg": 2}
    tower = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 16}
    values = tree({"family": "biencoder", "vocab_size": 64, **tower}, data=data)
    values["train"]["loss"] = "retrieval"
    batch = empty_batch(built(values, 1), load_plugins(), ParallelContext())
    assert batch["context_tokens"].shape == (2, 1 + 2, 16)


def test_a_machine_that_is_unknown_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="h100, h200, a100"):
        get_machine("h10")


def test_ranks_that_do_not_fit_the_axes_are_refused() -> None:
    config = built(tree(parallel={TP: 4}), 4)
    planner = Planner(config, load_plugins(), get_machine("h100"))
    with pytest.raises(ConfigError, match="does not divide the 6 processes"):
        planner.plan(config, 6)


def test_sixteen_thousand_ranks_are_planned() -> None:
    host = load_plugins()
    with as_world(16384):
        overrides = ["train.rampup_batch_size=null", "train.global_batch_size=16384"]
        config = load_config(GPT3, overrides=overrides, host=host).config
    plan = Planner(config, host, get_machine("h100")).plan(config, 16384)
    assert sum(row.count for row in plan.ranks) == 16384
    assert plan.memory_gib * GIB == plan.largest.total

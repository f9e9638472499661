"""A user's configuration made small enough for a few CPU processes, with everything kept that a layout can break."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from mt_core.config.checks import as_world, check_config
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config, ParallelConfig
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import CAUSAL_LM_SAMPLE
from mt_core.verify.axes import processes, shrink_axes
from mt_core.verify.stages import forget_division, shrink_stages

Tree = dict[str, dict[str, Any]]

HEAD_DIM = 8
FEW_EXPERTS = 8
BATCH = 8
SAME_EVERYWHERE = {"global_aux_loss": "aux_loss"}
VOCAB = 509
"""A prime: no number of ranks divides it."""
STEPS = 3
ON_EVERY_DEVICE = ("sdpa", "eager")
"""Attention backends that a CPU has. The second one serves every model."""
FULL_STATE = {"main_weights": "copies", "exp_avg_dtype": "fp32"}


def shrink(config: Config, host: PluginHost) -> Config:
    """The same family, options and axes with few and narrow layers, short sequences, made-up data, in fp32 on a CPU.

    Axes are halved until the model fits on LARGEST_WORLD processes, and stages become fewer with them. Dropout is off:
    what is dropped depends on the layout. What only a GPU can do, and what makes the same numbers faster, is as on a
    CPU. Raises ConfigError if the small configuration breaks a rule.
    """
    parallel, num_layers = _small_layout(config)
    tree = config.to_dict() | {"parallel": parallel.model_dump(mode="json")}
    if num_layers is not None:
        tree["model"]["num_layers"] = num_layers
    _shrink_model(tree["model"], parallel)
    if tree["model"].get("moe"):
        _shrink_experts(tree["model"], tree["parallel"])
    length = _short_length(tree)
    family = host.models.get(config.model.family, key="model.family")
    if family.shrink is not None:
        tree["model"] |= family.shrink.load()(tree["model"], length)
    _replace_data(tree, length, config, host)
    _shrink_training(tree, parallel)
    _compute_on_cpu(tree)
    small = config_from_dict(tree, host)
    _check(small, host)
    return small


def _check(small: Config, host: PluginHost) -> None:
    """Before processes are started, which would each tell the same."""
    try:
        with as_world(processes(small.parallel)):
            check_config(small)
            host.check_config(small)
    except ConfigError as error:
        raise ConfigError(f"this configuration, made small to be checked, breaks a rule: {error}") from error


def _small_layout(config: Config) -> tuple[ParallelConfig, int | None]:
    """[parallel], and model.num_layers; None where the family has another key."""
    small = shrink_axes(config.parallel)
    num_layers = config.model.model_dump().get("num_layers")
    if num_layers is None:
        return forget_division(small), None
    if hasattr(config.model, "stacked_layers"):
        return forget_division(small), min(num_layers, 2 * small.pipeline_model_parallel_size)
    division = shrink_stages(config.parallel, num_layers, small.pipeline_model_parallel_size)
    return small.model_copy(update=dict(division.keys)), division.num_layers


def _shrink_model(model: dict[str, Any], parallel: ParallelConfig) -> None:
    tp = parallel.tensor_model_parallel_size
    if "num_attention_heads" in model:
        groups = model.get("num_query_groups") or model["num_attention_heads"]
        per_group = min(model["num_attention_heads"] // groups, 2)
        groups = math.lcm(_ranks_with_own_heads(parallel), 2) if groups >= tp else groups
        heads = groups * per_group
        heads = heads * tp // math.gcd(heads, tp)
        model["num_attention_heads"] = heads
        if model.get("num_query_groups"):
            model["num_query_groups"] = groups
        if model.get("kv_channels"):
            model["kv_channels"] = HEAD_DIM
        model["hidden_size"] = heads * HEAD_DIM
    if model.get("ffn_hidden_size"):
        model["ffn_hidden_size"] = 16 * tp
    if "vocab_size" in model:
        model["vocab_size"] = VOCAB
        model["make_vocab_size_divisible_by"] = 4
    for key in model:
        if key.endswith("dropout"):
            model[key] = 0.0


def _ranks_with_own_heads(parallel: ParallelConfig) -> int:
    """Tensor-parallel ranks, and those that an all-to-all gives heads of theirs."""
    inner = {"a2a": parallel.context_parallel_size}
    if parallel.hierarchical_context_parallel_sizes is not None:
        inner["a2a+p2p"] = parallel.hierarchical_context_parallel_sizes[0]
    return parallel.tensor_model_parallel_size * inner.get(parallel.cp_comm_type, 1)


def _shrink_experts(model: dict[str, Any], parallel: Mapping[str, Any]) -> None:
    """Few and narrow experts, of which a token chooses as it did: from groups, or with shared ones."""
    moe = model["moe"]
    experts = math.lcm(FEW_EXPERTS, parallel["expert_model_parallel_size"])
    if moe["num_experts"] > experts or moe["num_experts"] % parallel["expert_model_parallel_size"]:
        moe["num_experts"] = experts
        moe["moe_router_topk"] = min(moe.get("moe_router_topk", 2), 2)
        if moe.get("moe_router_num_groups"):
            # Two of four groups, of two experts or more each.
            moe |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
            if moe.get("moe_router_group_score_topk"):
                moe["moe_router_group_score_topk"] = min(moe["moe_router_group_score_topk"], 2)
    narrow = 16 * parallel["tensor_model_parallel_size"]
    for key in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"):
        if moe.get(key):
            moe[key] = narrow
    losses = moe.get("moe_router_load_balancing_type", [])
    # The global loss is another one for another number of data-parallel ranks: what it counts comes in another order.
    moe["moe_router_load_balancing_type"] = [SAME_EVERYWHERE.get(loss, loss) for loss in losses] or ["aux_loss"]
    if isinstance(moe.get("moe_layer_freq"), str):
        dense = 1 if re.search(r"(?<!\d)0(?!\d)", moe["moe_layer_freq"]) else 0
        moe["moe_layer_freq"] = f"[0]*{dense}+[1]*{model['num_layers'] - dense}"


def _short_length(tree: Tree) -> int:
    """Of samples: a few tokens for each rank that shares a sequence."""
    parallel = tree["parallel"]
    unit = 2 * parallel["context_parallel_size"] * parallel["tensor_model_parallel_size"]
    return int(max(unit, min(tree["data"]["seq_length"], 16) // unit * unit))


def _replace_data(tree: Tree, length: int, config: Config, host: PluginHost) -> None:
    """Made-up samples, or those of a family's own data set, which follow the model in the keys that both have."""
    data = tree["data"]
    data |= {key: value for key, value in tree["model"].items() if key in data}
    spec = host.datasets.get(config.data.dataset_type, key="data.dataset_type")
    if spec.sample == CAUSAL_LM_SAMPLE:
        kept = {key: data[key] for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "read_by")}
        tree["data"] = {"dataset_type": "mock", **kept}
        tree["tokenizer"] = {"tokenizer_type": "ByteLevelTokenizer"}
    tree["data"]["seq_length"] = length
    for key in ("max_position_embeddings", "max_sequence_length"):
        if tree["model"].get(key):
            tree["model"][key] = max(length, 32)


def _shrink_training(tree: Tree, parallel: ParallelConfig) -> None:
    tree["train"].update(
        micro_batch_size=1,
        global_batch_size=_batch(parallel),
        rampup_batch_size=None,
        train_iters=2 * STEPS,
        train_samples=None,
        eval_interval=None,
        eval_iters=1,
        exit_iteration=None,
        callbacks=[],
        deterministic=False,
        sample_prompt=None,
        num_threads=1,
    )
    if "adam_eps" in tree["optimizer"]:
        # Adam makes a step of the learning rate's size out of any gradient, also of the rounding that is left of one
        # that is truly 0 (of a bias on keys). With a larger eps such a gradient stays small.
        tree["optimizer"]["adam_eps"] = 1e-4
    tree["lr_schedule"] = {"lr_decay_style": "constant"}
    tree["checkpoint"] = {"save_interval": None}
    tree["logging"] = {"progress": "none"}


def _batch(parallel: ParallelConfig) -> int:
    """The next number of samples that the copies of the model can share."""
    model = parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size
    copies = processes(parallel) // model
    return math.ceil(BATCH / copies) * copies


def _compute_on_cpu(tree: Tree) -> None:
    """Without what only a GPU has, and in fp32, where two ways to sum differ little."""
    tree["train"].update(device="cpu", compile="none", cuda_graphs="none", late_metrics="never")
    tree["kernels"] = {}
    tree["precision"] = {"dtype": "fp32"}
    model, optimizer = tree["model"], tree["optimizer"]
    if model.get("attention_backend", "sdpa") not in ON_EVERY_DEVICE:
        model["attention_backend"] = ON_EVERY_DEVICE[-1]
    # Both complete or round 16-bit numbers, the second by chance.
    optimizer |= {key: value for key, value in FULL_STATE.items() if key in optimizer}

"""What `shrink` makes of a configuration for many GPUs: what it resets, what it keeps, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from mt_core.config.loading import load_config_anywhere
from mt_core.config.parallel import ParallelConfig
from mt_core.config.schema import Config
from mt_core.data.training_length import build_batch_size, total_train_samples
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_core.train.pipelining import model_stages
from mt_tools.verify.changes import changed_keys, describe_changes, unseen
from mt_tools.verify.run_record import in_the_same_rounds
from mt_tools.verify.small_config import shrink
from mt_tools.verify.small_layout import processes, shrink_axes, shrink_layout

ON_128_GPUS = (
    "train.train_iters=9",
    "train.global_batch_size=64",
    "parallel.tensor_model_parallel_size=8",
    "parallel.pipeline_model_parallel_size=16",
)


def asked(*settings: str, preset: str = "gpt3-175b") -> Config:
    return load_config_anywhere(preset=preset, overrides=[*ON_128_GPUS, *settings], host=load_plugins()).config


def small(*settings: str) -> Config:
    return shrink(asked(*settings), load_plugins())


def layers_of_stages(config: Config) -> list[int]:
    return [len(stage.layers) for stage in model_stages(config, load_plugins())]


@pytest.mark.parametrize(
    ("section", "key", "given", "becomes"),
    [
        ("model", "attention_backend", "cudnn", "eager"),
        ("model", "attention_backend", "flash_attn_2", "eager"),
        ("model", "attention_backend", "flash_attn_3", "eager"),
        ("model", "attention_backend", "flash_attn_4", "eager"),
        ("model", "attention_backend", "flex", "eager"),
        ("train", "cuda_graphs", "blocks", "none"),
        ("train", "compile", "blocks", "none"),
        ("train", "deferred_metrics", "always", "never"),
        ("train", "device", "cuda", "cpu"),
        ("kernels", "layer_norm", "triton", "auto"),
        ("kernels", "adamw", "triton", "auto"),
        ("precision", "dtype", "bf16", "fp32"),
        ("precision", "fp8_format", "hybrid", "none"),
        ("optimizer", "exp_avg_dtype", "bf16", "fp32"),
    ],
)
def test_what_only_a_gpu_can_do_is_reset_and_said(section: str, key: str, given: str, becomes: str) -> None:
    config = asked(f"{section}.{key}={given}")
    reduced = shrink(config, load_plugins())
    assert getattr(getattr(reduced, section), key) == becomes
    assert f"{key} {given} -> {becomes}" in changed_keys(config, reduced)[section]


def test_a_whole_validation_set_becomes_one_batch_and_is_said() -> None:
    config = asked("train.full_validation=true")
    reduced = shrink(config, load_plugins())
    assert (reduced.train.full_validation, reduced.train.eval_iters) == (False, 1)
    assert any("full_validation" in change for change in changed_keys(config, reduced)["train"])


def test_an_fp8_implementation_goes_with_its_format() -> None:
    config = asked("precision.dtype=bf16", "precision.fp8_format=e4m3", "precision.fp8_implementation=te")
    reduced = shrink(config, load_plugins())
    assert reduced.precision.fp8_implementation == "auto"
    assert changed_keys(config, reduced)["precision"] == [
        "dtype bf16 -> fp32",
        "fp8_format e4m3 -> none",
        "fp8_implementation te -> auto",
    ]


def test_what_a_cpu_can_do_is_kept() -> None:
    kept = small(
        "model.attention_backend=sdpa",
        "recompute.recompute_granularity=selective",
        "train.loss=linear_cross_entropy",
        "train.verify_replicas_interval=2",
        "data.read_by=first",
        "parallel.use_distributed_optimizer=true",
        "parallel.overlap_param_gather=true",
    )
    assert kept.model.attention_backend == "sdpa"  # type: ignore[attr-defined]
    assert kept.recompute.recompute_granularity == "selective"
    assert (kept.train.loss, kept.train.verify_replicas_interval) == ("linear_cross_entropy", 2)
    assert kept.data.read_by == "first"
    assert kept.parallel.use_distributed_optimizer
    assert kept.parallel.overlap_param_gather


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        (("parallel.pipeline_model_parallel_layout=Et*6|(t*6|)*14t*6L",), [1, 1, 1, 1]),
        (("parallel.pipeline_model_parallel_layout=E|(t*7|)*13t*5|L",), [0, 1, 1, 0]),
        (
            (
                "parallel.num_layers_in_first_pipeline_stage=5",
                "parallel.num_layers_in_last_pipeline_stage=7",
            ),
            [1, 2, 2, 3],
        ),
        (("parallel.num_layers_in_first_pipeline_stage=21",), [2, 1, 1, 1]),
        (
            (
                "model.num_layers=94",
                "parallel.account_for_embedding_in_pipeline_split=true",
                "parallel.account_for_loss_in_pipeline_split=true",
            ),
            [1, 2, 2, 1],
        ),
        (
            (
                "parallel.pipeline_schedule=interleaved_1f1b",
                "parallel.virtual_pipeline_model_parallel_size=3",
                "parallel.pipeline_model_parallel_layout=Ett(|tt)*47L",
            ),
            [1] * 8,
        ),
        (
            (
                "parallel.pipeline_schedule=interleaved_1f1b",
                "parallel.virtual_pipeline_model_parallel_size=3",
                "parallel.num_layers_in_last_pipeline_stage=21",
                "parallel.num_layers_in_first_pipeline_stage=33",
            ),
            [3, 1, 1, 2, 3, 1, 1, 2],
        ),
    ],
)
def test_stages_shrink_with_the_axis_and_stay_as_uneven(settings: tuple[str, ...], layers: list[int]) -> None:
    reduced = small(*settings)
    assert (reduced.parallel.tensor_model_parallel_size, reduced.parallel.pipeline_model_parallel_size) == (2, 4)
    assert layers_of_stages(reduced) == layers
    assert reduced.model.num_layers == sum(layers)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ((), 4),
        (("parallel.pipeline_schedule=dualpipe_v",), 8),
        (("parallel.pipeline_schedule=interleaved_1f1b", "parallel.virtual_pipeline_model_parallel_size=6"), 8),
    ],
)
def test_stages_without_a_division_of_their_own_are_balanced(settings: tuple[str, ...], stages: int) -> None:
    found = layers_of_stages(small(*settings))
    assert (len(found), sum(found)) == (stages, 8)


@pytest.mark.parametrize(
    ("layout", "count", "expected"),
    [
        ("Et*3|(tt|)*29,m|L", 8, "Ett|t|t|t|t|t|tm|L"),
        ("Ett|tt|tt|ttmL", 2, "Et|tmL"),
        ("E|ttt|t|tL", 4, "E|tt|t|tL"),
        ("Et|tt|ttt|tttt|t*5L", 5, "Et|tt|ttt|ttt|tttL"),
    ],
)
def test_a_layout_string_keeps_its_letters_and_its_order_of_sizes(layout: str, count: int, expected: str) -> None:
    assert shrink_layout(layout, count) == expected


def axes(**sizes: object) -> ParallelConfig:
    return shrink_axes(ParallelConfig.model_validate(sizes))


def test_no_axis_goes_away_when_axes_are_halved() -> None:
    odd = axes(pipeline_model_parallel_size=5, tensor_model_parallel_size=3)
    assert (odd.pipeline_model_parallel_size, odd.tensor_model_parallel_size) == (3, 2)
    experts = axes(pipeline_model_parallel_size=16, expert_model_parallel_size=64)
    assert (experts.pipeline_model_parallel_size, experts.expert_model_parallel_size) == (2, 4)
    assert processes(experts) == 8


def test_axes_that_fit_are_kept() -> None:
    kept = axes(tensor_model_parallel_size=3, pipeline_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert (kept.tensor_model_parallel_size, kept.pipeline_model_parallel_size) == (3, 2)
    assert kept.expert_tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("sizes", "instances", "world"),
    [
        ({"tensor_model_parallel_size": 2}, 2, 8),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, 2, 8),
        ({}, 2, 4),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 1, 8),
        ({"context_parallel_size": 2, "expert_model_parallel_size": 8}, 1, 8),
    ],
)
def test_instances_are_kept_where_each_has_something_to_share(
    sizes: dict[str, int], instances: int, world: int
) -> None:
    layout = axes(use_distributed_optimizer=True, num_distributed_optimizer_instances=8, **sizes)
    assert (layout.num_distributed_optimizer_instances, processes(layout)) == (instances, world)


def test_heads_are_enough_for_an_all_to_all() -> None:
    config = load_config_anywhere(
        preset="gpt3-175b",
        overrides=[
            "train.train_iters=9",
            "parallel.context_parallel_size=8",
            "parallel.cp_comm_type=a2a",
        ],
        host=load_plugins(),
    ).config
    reduced = shrink(config, load_plugins())
    assert reduced.parallel.context_parallel_size == reduced.model.num_attention_heads == 8  # type: ignore[attr-defined]


def test_the_batch_divides_over_copies() -> None:
    config = load_config_anywhere(
        preset="mixtral-8x7b",
        overrides=["train.train_iters=9", "parallel.expert_model_parallel_size=3", "model.moe={num_experts = 6}"],
        host=load_plugins(),
    ).config
    reduced = shrink(config, load_plugins())
    assert processes(reduced.parallel) == 6
    assert reduced.train.global_batch_size == 12


def test_a_broken_rule_is_reported_before_processes_start() -> None:
    with pytest.raises(ConfigError, match=r"made small to be checked, breaks a rule: .*window_attn_skip_freq"):
        shrink(
            load_config_anywhere(
                preset="gpt-oss-20b",
                overrides=["train.train_iters=9", "model.window_attn_skip_freq=[1]*12+[0]*12"],
                host=load_plugins(),
            ).config,
            load_plugins(),
        )


def test_values_that_nobody_set_are_not_reported() -> None:
    config = asked()
    text = describe_changes(config, shrink(config, load_plugins()))
    assert "pipeline_model_parallel_size 16 -> 4" in text
    assert "eval_iters" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_real_vocabulary_is_kept_and_no_number_of_ranks_divides_it(tmp_path) -> None:
    """Tokens of a family's own data are those of its tokenizer."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(1995))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    config = load_config_anywhere(
        preset="bert-base-uncased",
        overrides=[
            "train.train_iters=9",
            "parallel.tensor_model_parallel_size=2",
            "tokenizer.tokenizer_type=BertWordPieceLowerCase",
            f"tokenizer.vocab_file={tmp_path}/vocab.txt",
            "data.dataset_type=bert",
            f'data.data_path=["{tmp_path}/sentences"]',
        ],
        host=load_plugins(),
    ).config
    reduced = shrink(config, load_plugins())
    assert reduced.model.vocab_size == 2003  # the next number without a divisor up to 8
    assert reduced.tokenizer == config.tokenizer
    assert reduced.model.hidden_dropout == 0.1  # type: ignore[attr-defined]
    assert reduced.model.attention_dropout == 0.0  # type: ignore[attr-defined]


def test_training_has_what_a_layout_can_break() -> None:
    reduced = shrink(asked(), load_plugins(), steps=4, dropout=0.3)
    train = reduced.train
    assert (train.global_batch_size, train.rampup_batch_size) == (8, (4, 4, 4))
    sizes = [size for _, size in build_batch_size(reduced).steps(0, total_train_samples(reduced))]
    assert sizes == [4] + [8] * 7
    assert train.eval_interval == 2
    assert reduced.lr_schedule.lr_decay_style == "cosine"
    assert (reduced.model.hidden_dropout, reduced.model.attention_dropout) == (0.3, 0.0)  # type: ignore[attr-defined]


def test_one_process_has_the_samples_of_all_ranks_where_they_are_compared() -> None:
    host = load_plugins()
    keys = ["train.train_iters=9", "data.dataset_type=mock", "model.vocab_size=600"]
    config = load_config_anywhere(preset="ict-base", overrides=keys, host=host).config
    reduced = shrink(config, host, dropout=0.3)
    assert in_the_same_rounds(reduced, 1, reduced, host).train.micro_batch_size == 2
    assert reduced.model.hidden_dropout == 0.0  # type: ignore[attr-defined]
    assert in_the_same_rounds(small(), 1, small(), host).train.micro_batch_size == 1


def with_experts(balance: str, *more: str) -> Config:
    moe = f"model.moe={{num_experts = 4, moe_router_topk = 2, {balance}}}"
    keys = ["train.train_iters=9", "model.attention_dropout=0.1", moe, *more]
    return load_config_anywhere(preset="gpt-tiny", overrides=keys, host=load_plugins()).config


GLOBAL = "moe_router_load_balancing_type = ['global_aux_loss'], moe_aux_loss_coeff = [0.1]"
BOTH = "moe_router_load_balancing_type = ['global_aux_loss', 'aux_loss'], moe_aux_loss_coeff = [0.1, 0.1]"
PP2 = "parallel.pipeline_model_parallel_size=2"


@pytest.mark.parametrize(
    ("balance", "keys", "same_rounds", "kept"),
    [
        (GLOBAL, (), True, True),
        (GLOBAL, (), False, False),
        (GLOBAL, (PP2,), True, False),
        (BOTH, (), True, False),
        (f"{GLOBAL}, moe_expert_capacity_factor = 1.0", (), True, False),
    ],
)
def test_the_global_balance_loss_is_kept_where_layouts_agree_in_it(balance, keys, same_rounds, kept) -> None:
    host, config = load_plugins(), with_experts(balance, *keys)
    reduced = shrink(config, host, same_rounds=same_rounds)
    assert ("global_aux_loss" in reduced.model.moe["moe_router_load_balancing_type"]) == kept  # type: ignore[attr-defined]
    assert any("global_aux_loss" in text for text in unseen(config, reduced)) != kept
    assert in_the_same_rounds(reduced, 1, reduced, host).train.micro_batch_size == (2 if kept else 1)


def test_what_cannot_be_seen_is_said() -> None:
    chosen = ("precision.dtype=bf16", "train.compile=blocks", "parallel.tensor_model_parallel_size=2")
    config = asked(*chosen, "model.attention_dropout=0.1", "model.hidden_dropout=0.1")
    in_fp32, in_bf16 = (
        " ".join(unseen(config, shrink(config, load_plugins(), dtype=dtype))) for dtype in ("fp32", "bf16")
    )
    assert "arithmetic in bf16: --dtype bf16" in in_fp32
    assert "arithmetic" not in in_bf16
    for words in ("attention dropout", "compilation"):
        assert words in in_fp32
        assert words in in_bf16
    plain = with_experts("moe_aux_loss_coeff = [0.1]", "model.attention_dropout=0")
    assert unseen(plain, shrink(plain, load_plugins())) == []


def test_precision_of_16_bits_keeps_what_is_configured_for_it() -> None:
    config = asked("precision.dtype=bf16", "precision.grad_reduce_in_bf16=true")
    assert shrink(config, load_plugins(), dtype="bf16").precision.grad_reduce_in_bf16
    assert shrink(config, load_plugins(), dtype="fp16").precision.initial_loss_scale == 2.0**10
    assert shrink(config, load_plugins()).precision.dtype == "fp32"


def test_windows_in_any_order_of_layers_become_an_interval() -> None:
    """A list has a number for each layer, of which a small model has fewer."""
    layers = ("train.train_iters=9", "model.num_layers=5", "model.sliding_window_pattern='([1]*2+[0]*2+[1])'")
    config = load_config_anywhere(preset="gemma3-1b", overrides=layers, host=load_plugins()).config
    shrunk: Any = shrink(config, load_plugins()).model
    assert (shrunk.num_layers, shrunk.sliding_window_pattern) == (2, 2)


@pytest.mark.parametrize(
    ("pattern", "stages", "becomes"),
    [
        ("([0]*3+[1]*58)", 2, "([0]*1+[1]*2)"),
        ("([1]*61)", 1, "([1]*2)"),
        # Dense layers behind others: a stage of the second layer alone has no experts.
        ("([0]*1+[1]*20+[0]*1+[1]*39)", 1, "([1]*1+[0]*1)"),
        ("([0]*1+[1]*20+[0]*1+[1]*39)", 2, "([1]*1+[0]*1+[1]*1)"),
        ("([1]*30+[0]*31)", 2, "([1]*2+[0]*1)"),
    ],
)
def test_dense_layers_stay_behind_and_between_layers_with_experts(pattern: str, stages: int, becomes: str) -> None:
    settings = [f"model.moe.moe_layer_freq={pattern!r}", f"parallel.pipeline_model_parallel_size={stages}"]
    if stages == 2:
        settings += ["parallel.num_layers_in_first_pipeline_stage=31"]
    asked_for = load_config_anywhere(
        preset="deepseek-v3",
        overrides=["train.train_iters=9", "model.mtp_num_layers=0", *settings],
        host=load_plugins(),
    )
    made = shrink(asked_for.config, load_plugins()).model.model_dump()
    assert (made["num_layers"], made["moe"]["moe_layer_freq"]) == (stages + 1, becomes)

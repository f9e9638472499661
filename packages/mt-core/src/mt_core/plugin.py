"""What mt-core registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.specs import (
    AttentionBackendSpec,
    BatchSourceSpec,
    CallbackSpec,
    ContextParallelMethodSpec,
    FeedForwardSpec,
    LossSpec,
    LRScheduleSpec,
    ModelSpec,
    ModelTransformSpec,
    OptimizerSpec,
    PipelineScheduleSpec,
    RunRequestSpec,
)

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.plugins import PluginHost


@hookimpl
def mt_register_attention_backends() -> list[AttentionBackendSpec]:
    return [
        AttentionBackendSpec(
            name="sdpa",
            doc="torch's scaled_dot_product_attention",
            supports=Lazy("mt_core.nn.attention:supports_sdpa"),
            build=Lazy("mt_core.nn.attention:build_sdpa"),
        ),
        AttentionBackendSpec(
            name="eager",
            doc="Attention written out, softmax in fp32; the reference for the others",
            supports=Lazy("mt_core.nn.attention:supports_eager"),
            build=Lazy("mt_core.nn.attention:build_eager"),
        ),
        AttentionBackendSpec(
            name="cudnn",
            doc="torch's attention with cuDNN's kernel first, for Hopper; documents by variable length",
            supports=Lazy("mt_core.nn.attention_backends.cudnn:supports_cudnn"),
            build=Lazy("mt_core.nn.attention_backends.cudnn:build_cudnn"),
        ),
        AttentionBackendSpec(
            name="flash_attn_2",
            doc="FlashAttention 2, where the package flash_attn is installed",
            supports=Lazy("mt_core.nn.attention_backends.flash:supports_flash_2"),
            build=Lazy("mt_core.nn.attention_backends.flash:build_flash_2"),
        ),
        AttentionBackendSpec(
            name="flash_attn_3",
            doc="FlashAttention 3 for Hopper, where flash_attn_interface is installed",
            supports=Lazy("mt_core.nn.attention_backends.flash:supports_flash_3"),
            build=Lazy("mt_core.nn.attention_backends.flash:build_flash_3"),
        ),
        AttentionBackendSpec(
            name="flash_attn_4",
            doc="FlashAttention 4 for Hopper and Blackwell, where flash-attn-4 is installed",
            supports=Lazy("mt_core.nn.attention_backends.flash:supports_flash_4"),
            build=Lazy("mt_core.nn.attention_backends.flash:build_flash_4"),
        ),
        AttentionBackendSpec(
            name="flex",
            doc="FlexAttention: any mask, window, bias or soft cap in one compiled kernel, on cuda",
            supports=Lazy("mt_core.nn.attention_backends.flex:supports_flex"),
            build=Lazy("mt_core.nn.attention_backends.flex:build_flex"),
        ),
        AttentionBackendSpec(
            name="batch_invariant",
            doc="A query's result depends on its own keys only, to the last bit; used by numerics.batch_invariant",
            supports=Lazy("mt_core.nn.attention_backends.batch_invariant:supports_batch_invariant"),
            build=Lazy("mt_core.nn.attention_backends.batch_invariant:build_batch_invariant"),
        ),
    ]


@hookimpl
def mt_register_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="module",
            doc="A torch.nn.Module of your own, given to Engine or Trainer",
            config_type=Lazy("mt_core.config.schema:PlainModuleConfig"),
            build=Lazy("mt_core.nn.plain_module:build_plain_module"),
            presets=Lazy("mt_core.config.sources:NO_PRESETS"),
        )
    ]


def _pipeline_schedule(name: str, schedule: str, doc: str) -> PipelineScheduleSpec:
    return PipelineScheduleSpec(name=name, doc=doc, schedule=Lazy(f"mt_core.parallel.pipeline.schedules:{schedule}"))


@hookimpl
def mt_register_pipeline_schedules() -> list[PipelineScheduleSpec]:
    return [
        _pipeline_schedule("gpipe", "GPIPE", "All forward passes, then all backward passes"),
        _pipeline_schedule("1f1b", "ONE_F_ONE_B", "One forward and one backward pass in turn"),
        _pipeline_schedule("interleaved_1f1b", "INTERLEAVED_1F1B", "1f1b over several stages of each rank"),
        _pipeline_schedule("interleaved_zero_bubble", "INTERLEAVED_ZERO_BUBBLE", "ZB1P: backward passes in two halves"),
        _pipeline_schedule("zbv_zero_bubble", "ZBV_ZERO_BUBBLE", "ZB-V: the same, two stages of a rank in a V"),
        _pipeline_schedule("dualpipe_v", "DUALPIPE_V", "DeepSeek's DualPipe, halved: a V run from both ends"),
    ]


def _context_parallel_method(
    name: str, function: str, doc: str, *, hierarchical: bool = False, whole_sequences: bool = False
) -> ContextParallelMethodSpec:
    module = "mt_core.nn.context_parallel.core"
    return ContextParallelMethodSpec(
        name=name,
        doc=doc,
        build=Lazy(f"{module}:build_{function}"),
        check=Lazy(f"{module}:check_inner_heads") if whole_sequences or hierarchical else None,
        hierarchical=hierarchical,
        whole_sequences=whole_sequences,
    )


@hookimpl
def mt_register_context_parallel_methods() -> list[ContextParallelMethodSpec]:
    return [
        _context_parallel_method("p2p", "p2p", "Keys and values go round to the ranks that see them"),
        _context_parallel_method("all_gather", "all_gather", "Keys and values go to all ranks at once"),
        _context_parallel_method(
            "a2a", "a2a", "All tokens go to the ranks that have the heads (Ulysses)", whole_sequences=True
        ),
        _context_parallel_method(
            "a2a+p2p", "hierarchical", "a2a over an inner axis, p2p over an outer one", hierarchical=True
        ),
    ]


@hookimpl
def mt_register_feed_forwards() -> list[FeedForwardSpec]:
    return [
        FeedForwardSpec(
            name="dense",
            doc="Two matrices with an activation between them",
            config_type=Lazy("mt_core.nn.feed_forward:DenseConfig"),
            build=Lazy("mt_core.nn.feed_forward:build_dense"),
        )
    ]


@hookimpl
def mt_register_optimizers() -> list[OptimizerSpec]:
    return [
        OptimizerSpec(
            name="adam",
            doc="AdamW, with decoupled weight decay",
            config_type=Lazy("mt_core.optim.configs:AdamConfig"),
            build=Lazy("mt_core.optim.optimizers:build_adam"),
        ),
        OptimizerSpec(
            name="sgd",
            doc="Stochastic gradient descent with momentum",
            config_type=Lazy("mt_core.optim.configs:SGDConfig"),
            build=Lazy("mt_core.optim.optimizers:build_sgd"),
        ),
        OptimizerSpec(
            name="lion",
            doc="Lion: the sign of a momentum",
            config_type=Lazy("mt_core.optim.configs:LionConfig"),
            build=Lazy("mt_core.optim.optimizers:build_lion"),
        ),
        OptimizerSpec(
            name="muon",
            doc="Muon: orthogonal momentum for matrices, Adam or Lion for the rest",
            config_type=Lazy("mt_core.optim.configs:MuonConfig"),
            build=Lazy("mt_core.optim.muon:build_muon"),
        ),
    ]


def _schedule(name: str, function: str, doc: str, config: str = "config.schema:LRScheduleConfig") -> LRScheduleSpec:
    return LRScheduleSpec(
        name=name,
        doc=doc,
        config_type=Lazy(f"mt_core.{config}"),
        build=Lazy(f"mt_core.optim.schedules:{function}"),
    )


@hookimpl
def mt_register_lr_schedules() -> list[LRScheduleSpec]:
    return [
        _schedule("constant", "build_constant", "Warm-up, then constant"),
        _schedule("linear", "build_linear", "Warm-up, then a line down to min_lr"),
        _schedule("cosine", "build_cosine", "Warm-up, then half a cosine down to min_lr"),
        _schedule("inverse-square-root", "build_inverse_square_root", "Warm-up, then 1 / sqrt(samples)"),
        _schedule("WSD", "build_wsd", "Warm-up, stable, then a tail", "optim.configs:WSDScheduleConfig"),
    ]


@hookimpl
def mt_register_losses() -> list[LossSpec]:
    return [
        LossSpec(
            name="cross_entropy",
            doc="Cross entropy of the next token, softmax in fp32",
            build=Lazy("mt_core.nn.loss:build_cross_entropy"),
            in_nats_per_token=True,
        ),
        LossSpec(
            name="linear_cross_entropy",
            doc="The same from hidden states, without the logits in memory",
            equivalent_to="cross_entropy",
            build=Lazy("mt_core.nn.loss:build_linear_cross_entropy"),
            in_nats_per_token=True,
        ),
        LossSpec(
            name="linear_cross_entropy_sum",
            doc="The same in fewer products: gradients are made in the forward pass",
            equivalent_to="cross_entropy",
            build=Lazy("mt_core.nn.loss:build_linear_cross_entropy_sum"),
            in_nats_per_token=True,
        ),
    ]


@hookimpl
def mt_register_run_requests() -> list[RunRequestSpec]:
    answers = "mt_core.train.run_control:answer_"
    return [
        RunRequestSpec(name="save", doc="Writes a checkpoint of this step", answer=Lazy(f"{answers}save")),
        RunRequestSpec(name="eval", doc="Evaluates on the validation sets", answer=Lazy(f"{answers}evaluate")),
        RunRequestSpec(name="stop", doc="Saves and stops", answer=Lazy(f"{answers}stop")),
        RunRequestSpec(name="note", doc="Writes a text to the events of the run", answer=Lazy(f"{answers}note")),
        RunRequestSpec(name="set", doc="Changes a value of the configuration", answer=Lazy(f"{answers}set")),
    ]


@hookimpl
def mt_register_batch_sources() -> list[BatchSourceSpec]:
    return [
        BatchSourceSpec(
            name="dataset",
            doc="The batches of the data set, which follow from the number of samples that were consumed",
            build=Lazy("mt_core.train.batch_source:DatasetBatches"),
        )
    ]


@hookimpl
def mt_register_model_transforms() -> list[ModelTransformSpec]:
    return [
        ModelTransformSpec(
            name="freeze",
            doc="Leaves the parameters of train.frozen_parameters out of training",
            applies=Lazy("mt_core.nn.freezing:freezes_parameters"),
            transform=Lazy("mt_core.nn.freezing:freeze_parameters"),
        )
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="metrics_jsonl",
            doc="Writes metrics.jsonl in the run directory",
            build=Lazy("mt_core.train.reporting.log_files:build_metrics_jsonl"),
            always=True,
        ),
        CallbackSpec(
            name="event_log",
            doc="Writes events.jsonl and environment.json in the run directory",
            build=Lazy("mt_core.train.reporting.event_log:build_event_log"),
            always=True,
        ),
        CallbackSpec(
            name="early_stop",
            doc="Stops a run whose metric does not improve any more (train.early_stop_patience)",
            build=Lazy("mt_core.train.common_callbacks:build_early_stop"),
            always=True,
        ),
        CallbackSpec(
            name="host_memory",
            doc="Records the resident memory of the largest process (host_memory_gb)",
            build=Lazy("mt_core.train.common_callbacks:build_host_memory"),
            all_ranks=True,
        ),
        CallbackSpec(
            name="log_file",
            doc="Writes log.txt in the run directory",
            build=Lazy("mt_core.train.reporting.log_files:build_log_file"),
            always=True,
        ),
    ]


@hookimpl
def mt_check_config(config: Config, host: PluginHost) -> None:
    from mt_core.config.metrics import check_metrics
    from mt_core.optim.configs import check_main_weights, check_optimizer
    from mt_core.train.layout_checks import check_context_parallel_method, check_pipeline_schedule

    check_optimizer(config.optimizer)
    check_main_weights(config)
    check_pipeline_schedule(config, host)
    check_context_parallel_method(config, host)
    check_metrics(config, host)

"""The section [parallel] of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section, used_when


class CommunicatorConfig(Section):
    """Options of an axis's communicators. NCCL chooses what is not set."""

    is_high_priority_stream: bool = False
    """Kernels of its collectives run before waiting kernels of other streams."""
    timeout_minutes: PositiveFloat | None = None
    """An operation that takes longer ends the run. Default: a minute more than the longest of the run's timeouts."""
    min_ctas: PositiveInt | None = None
    """Least thread blocks (SMs) of a collective."""
    max_ctas: PositiveInt | None = None
    """Most thread blocks (SMs) of a collective."""
    cga_cluster_size: NonNegativeInt | None = None
    """Thread blocks in a cluster, on Hopper and later."""
    net_name: str | None = None
    """Network of the communicators (IB, Socket), where NCCL finds several."""


CommunicatorAxis = Literal[
    "tp", "cp", "dp", "pp", "pp_backward", "etp", "ep", "edp", "dp_cp", "model", "shard", "replicate", "expert_shard",
    "expert_replicate",
]  # fmt: skip
"""Axes of mt_core.parallel.context that have communicators."""


class ParallelConfig(Section):
    """How the model and the batch are sharded over processes. Data parallel takes the rest of the world."""

    tensor_model_parallel_size: PositiveInt = 1
    """Processes that share each layer's matrices."""
    sequence_parallel: bool = False
    """Between tensor-parallel matrices activations are sharded along the sequence."""
    tp_comm_overlap: bool = used_when(False, sequence_parallel=True)
    """Products of tensor-parallel layers are computed in parts, while the parts of other ranks are gathered or sums are
    scattered, by torch's symmetric memory: GPUs that reach each other over NVLink."""
    context_parallel_size: PositiveInt = 1
    """Processes that share each sequence."""
    cp_comm_type: str = "p2p"
    """Name of the way in which attention reaches the keys of the other processes of a sequence; see
    docs/guides/context-parallel.md."""
    hierarchical_context_parallel_sizes: tuple[PositiveInt, PositiveInt] | None = Field(None, strict=False)
    """[ranks of an all-to-all, ranks of a point-to-point round]; their product is context_parallel_size."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages of layers."""
    pipeline_schedule: str = "1f1b"
    """Name of the order in which a stage runs the forward and backward passes of micro-batches; see
    docs/guides/pipeline.md."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Stages of each process. Default: as few as the schedule can have (2 for interleaved_1f1b and the V-shaped)."""
    pipeline_model_parallel_layout: str | None = None
    """What each stage holds, as `Et*3|(tt|)*6mL`: E embedding, t a layer, L the loss, | between stages. Default:
    layers are partitioned so that stages cost about the same."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first pipeline rank; the others have the same number each (Megatron's
    decoder_first_pipeline_num_layers)."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last pipeline rank (Megatron's decoder_last_pipeline_num_layers)."""
    account_for_embedding_in_pipeline_split: bool = False
    """Layers are partitioned evenly, and the embedding counts as one layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Layers are partitioned evenly, and the LM head with the loss counts as one layer of the last stage."""
    expert_model_parallel_size: PositiveInt = 1
    """Processes that share the experts of an MoE layer."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Processes that share each expert's matrices. Default: tensor_model_parallel_size."""
    use_distributed_optimizer: bool = False
    """Processes with the same weights share the optimizer's state (ZeRO-1)."""
    use_torch_fsdp2: bool = False
    """Processes with the same weights share weights, gradients and state (FSDP2: ZeRO-3, or ZeRO-2)."""
    fsdp_reshard_after_forward: bool = used_when(True, use_torch_fsdp2=True)
    """Collected weights are let go between forward and backward (ZeRO-3); else they stay (ZeRO-2)."""
    fsdp_reduce_each_micro_batch: bool = used_when(False, use_torch_fsdp2=True)
    """Gradients are reduce-scattered after each micro-batch, so that a process holds those of its shard alone; else
    those of several micro-batches are accumulated unsharded, in fp32, and sent once a step."""
    num_distributed_optimizer_instances: PositiveInt = 1
    """Replicas of what is sharded: shards are spread over as many groups of neighbouring ranks (HSDP)."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = used_when("no_shard", use_torch_fsdp2=True)
    """`optim`: the groups of num_distributed_optimizer_instances share the optimizer's state, of which each updates a
    part of its shards and collects the others; `no_shard`: each has all of it."""
    overlap_grad_reduce: bool = True
    """Gradients are summed over processes while the backward pass runs."""
    overlap_param_gather: bool = used_when(False, use_distributed_optimizer=True)
    """Updated weights are collected while the next forward pass runs."""
    ddp_bucket_size: PositiveInt = 40_000_000
    """Elements of gradients after which they are sent."""
    nccl_communicators: dict[CommunicatorAxis, CommunicatorConfig] = Field(default_factory=dict)
    """Options of communicators by axis (Megatron's nccl_communicator_config_path, high_priority_stream_groups and
    distributed_timeout_minutes). An axis with options has communicators of its own."""
    pipeline_backward_communicator: bool | None = None
    """Gradients between pipeline stages have communicators of their own (the axis pp_backward), so that they wait for
    no activations on the way. Default: on a GPU."""
    nccl_ub: bool = False
    """Buffers of gradients and weights are in memory that NCCL registers (user buffers), which its collectives read and
    write without copies."""

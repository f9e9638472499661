"""What a rank does for a job: builds a model, loads a checkpoint, computes logits and losses, trains, saves."""

from __future__ import annotations

import os
import traceback
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import torch
from batches import BATCHES
from megatron.core import parallel_state as mpu
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config
from megatron.training import checkpointing, global_vars, training
from torch import Tensor
from torch import distributed as dist


def run(folder: Path) -> None:
    request = torch.load(folder / "request.pt")
    torch.set_num_threads(1)
    args = models.parse(request)
    _start(args)
    chunks = training.get_model(lambda **given: _provide(args, request["family"], **given), wrap_with_ddp=True)
    optimizer = scheduler = None
    if request["num_steps"] or request["save"] or request["load_optimizer"]:
        config, overrides = training.get_megatron_optimizer_config(args)
        optimizer = get_megatron_optimizer(config, chunks, config_overrides=overrides)
        scheduler = training.get_optimizer_param_scheduler(optimizer)
    loaded = _load(args, chunks, optimizer, scheduler) if request["load"] else {"iteration": 0}
    answer: dict[str, Any] = {"padded_vocab_size": args.padded_vocab_size, **loaded}
    answer["num_parameters"] = _num_parameters(chunks)
    if request["inputs"]:
        answer |= _evaluate(args, request, chunks)
        answer["step_losses"] = _train(args, request, chunks, optimizer, scheduler)
    if request["weights"]:
        answer["weights"] = _weights(chunks)
    if request["save"]:
        args.save, args.ckpt_format = request["save"], request["save_format"]
        args.use_dist_ckpt = args.ckpt_format != "torch"
        checkpointing.save_checkpoint(loaded["iteration"] + request["num_steps"], chunks, optimizer, scheduler, 0)
    if mpu.is_pipeline_last_stage(ignore_virtual=True) and _of_first_replica():
        torch.save(answer, folder / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


def _start(args: Namespace) -> None:
    global_vars.set_global_variables(args, build_tokenizer=False)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(args.seed)


def _provide(
    args: Namespace,
    family: str,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: object = None,
    pg_collection: Any = None,
) -> Any:
    pg = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    return models.build(args, family, pre_process, post_process, vp_stage, pg)


def _load(args: Namespace, chunks: list[Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """The iteration. A strict load that fails is tried again by Megatron, not strictly: that is an error here."""
    failures: list[str] = []
    for chunk in chunks:
        _note_failures(chunk, failures)
    iteration, _ = checkpointing.load_checkpoint(chunks, optimizer, scheduler, strict=True)
    if failures:
        raise RuntimeError("strict load failed:\n" + "\n".join(failures))
    return {"iteration": iteration}


def _note_failures(chunk: Any, failures: list[str]) -> None:
    original = chunk.load_state_dict

    def load_state_dict(state_dict: Any, strict: bool = True) -> Any:
        try:
            return original(state_dict, strict=strict)
        except Exception as error:
            failures.append(str(error))
            traceback.print_exc()
            raise

    chunk.load_state_dict = load_state_dict


def _of_first_replica() -> bool:
    return mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_data_parallel_rank() == 0


def _num_parameters(chunks: list[Any]) -> int:
    """Of this rank's chunks; the same weights on several ranks are not told apart."""
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


def _weights(chunks: list[Any]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": parameter.detach().clone()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    }


# -- computing ------------------------------------------------------------------------------------------


def _evaluate(args: Namespace, request: dict[str, Any], chunks: list[Any]) -> dict[str, Any]:
    """logits [batch, sequence, padded vocabulary], token_losses [batch, sequence], of BERT binary_logits [batch, 2]."""
    for chunk in chunks:
        chunk.eval()
        if request["double"]:
            _compute_in_double(chunk)
    with torch.no_grad():
        with_labels = _passes(args, request, chunks, labels=True)
        without = _passes(args, request, chunks, labels=False)
    answer: dict[str, Any] = {}
    if with_labels:  # on the last stage
        answer["token_losses"] = torch.cat([losses for losses, _ in with_labels])
        answer["logits"] = torch.cat([_gathered(logits) for logits, _ in without])
        binary = [scores for _, scores in without if scores is not None]
        answer |= {"binary_logits": torch.cat(binary)} if binary else {}
    return {name: _of_all_replicas(tensor) for name, tensor in answer.items()}


def _compute_in_double(chunk: Any) -> None:
    """Weights, the dtype that layers cast their inputs to, and what is fp32 whatever the weights are. The process ends
    with the job."""
    chunk.module.double()
    get_model_config(chunk).params_dtype = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def _passes(args: Namespace, request: dict[str, Any], chunks: list[Any], *, labels: bool) -> list[Any]:
    def forward(data: Iterator[Any], model: Any) -> Any:
        return BATCHES[request["family"]].forward(model, next(data), labels), lambda output, **_: _two(output)

    return _run_schedule(args, request, chunks, forward, forward_only=True, collect_non_loss_data=True)


def _two(output: Any) -> tuple[Any, Any]:
    return output if isinstance(output, tuple) else (output, None)


def _train(args: Namespace, request: dict[str, Any], chunks: list[Any], optimizer: Any, scheduler: Any) -> list[float]:
    """Mean loss of each step before its update."""

    def forward(data: Iterator[Any], model: Any) -> Any:
        return BATCHES[request["family"]].forward(model, next(data), True), mean

    def mean(output: Any) -> Any:
        loss = _two(output)[0].float().mean()
        return loss, {"loss": loss.detach().clone()}

    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss if optimizer is not None else None
    losses = []
    for chunk in chunks:
        chunk.train()
    for _ in range(request["num_steps"]):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = _run_schedule(args, request, chunks, forward, forward_only=False)
        optimizer.step()
        scheduler.step(increment=args.global_batch_size)
        losses.append(_mean_of_all(found))
    return losses


def _mean_of_all(found: list[Any]) -> float:
    if not found:
        return float("nan")
    mean = torch.stack([entry["loss"] for entry in found]).mean()
    return float(_of_all_replicas(mean.reshape(1)).mean())


def _run_schedule(
    args: Namespace, request: dict[str, Any], chunks: list[Any], forward: Any, **options: Any
) -> list[Any]:
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    rows = list(zip(*(tensor.split(1) for tensor in request["inputs"].values()), strict=True))
    mine = [dict(zip(request["inputs"], row, strict=True)) for row in rows[rank::size]]
    iterators = [iter(mine) for _ in chunks]
    length = next(iter(request["inputs"].values())).shape[1]
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(mine),
        seq_length=length,
        micro_batch_size=1,
        decoder_seq_length=length,
        **options,
    )


def _gathered(shard: Tensor) -> Tensor:
    """All columns of logits that are sharded over tensor parallel ranks."""
    size = mpu.get_tensor_model_parallel_world_size()
    parts = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(parts, shard.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)


def _of_all_replicas(tensor: Tensor) -> Tensor:
    """Rows in the order of the request: data parallel rank r has the rows r, r + size, ..."""
    size = mpu.get_data_parallel_world_size()
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=mpu.get_data_parallel_group())
    return torch.stack(parts, dim=1).flatten(0, 1)

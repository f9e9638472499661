"""Megatron-Core on a CPU: its own layers, distributed data parallel wrapper, schedule and optimizer, one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import Case
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "peer" / "megatron_process"))

LLAMA = (
    "--normalization=RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
    "--position-embedding-type=rope",
    "--use-rotary-position-embeddings",
)


def arguments(case: Case) -> list[str]:
    sizes = {
        "num-layers": case.layers,
        "hidden-size": case.hidden,
        "ffn-hidden-size": case.ffn,
        "num-attention-heads": case.heads,
        "seq-length": case.sequence,
        "max-position-embeddings": case.sequence,
        "vocab-size": case.vocab,
        "micro-batch-size": case.batch,
        "global-batch-size": case.batch,
        "clip-grad": 1.0,
        "tokenizer-type": "NullTokenizer",
        "make-vocab-size-divisible-by": 1,
    }
    if case.experts:
        experts = {"num-experts": case.experts, "moe-router-topk": case.topk, "moe-router-load-balancing-type": "none"}
        sizes |= {**experts, "moe-ffn-hidden-size": case.ffn}
    return [*(f"--{key}={value}" for key, value in sizes.items()), *(LLAMA if case.gated else ())]


def build(case: Case) -> tuple[Callable[[Tensor], float], int]:
    import cuda_on_cpu

    seed_all = torch.cuda.manual_seed_all
    cuda_on_cpu.apply_before_import()
    torch.cuda.manual_seed_all = seed_all  # which torch.manual_seed calls, except in a forked process

    cuda_on_cpu.apply_after_import()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    return _built(case)


def _built(case: Case) -> tuple[Callable[[Tensor], float], int]:
    import jobs
    import models
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.utils import get_model_config
    from megatron.training import training

    args = models.parse({"arguments": arguments(case), "load": None, "family": "gpt"})
    jobs._start(args)
    (model,) = training.get_model(lambda **given: jobs._provide(args, "gpt", **given), wrap_with_ddp=True)
    config, overrides = training.get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides)
    shape = get_model_config(model)
    shape.finalize_model_grads_func, shape.grad_scale_func = jobs.finalize_model_grads, optimizer.scale_loss
    model.train()

    def step(ids: Tensor) -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = _pass(model, ids, case)
        optimizer.step()
        return loss

    return step, sum(p.numel() for p in model.parameters())


def _pass(model: Any, ids: Tensor, case: Case) -> float:
    from batches import Decoder
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    def forward(data: Any, model: Any) -> Any:
        return Decoder.forward(model, next(data), True), mean

    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([{"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}]),
        model=model,
        num_microbatches=1,
        seq_length=case.sequence,
        micro_batch_size=case.batch,
        forward_only=False,
    )
    return float(found[0]["loss"])

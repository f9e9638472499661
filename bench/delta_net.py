"""A hybrid of gated delta nets and attention (30 M parameters, three to one) beside transformers' torch path: the same
weights, one thread, fp32, in alternating rounds.

    python bench/delta_net.py --rounds 5 [--part training] [--profile]

Prints medians of the ratios of processor time: a training step of 2 sequences of 512 tokens (mt's Trainer;
transformers' model with its loss, clipping and the fused AdamW), and 64 tokens decoded greedily behind a prompt of 64:
one request, and eight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.data.loader import RankBatch
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import build
from mt_core.train.trainer import Trainer
from mt_infer import InferenceEngine, SamplingParameters
from mt_infer.config import InferenceConfig
from mt_infer.lm_head import store_by_columns
from mt_models.hugging_face import to_reference
from mt_models.qwen_next.hugging_face import HUGGING_FACE
from mt_tools.bench.report import as_line, conditions
from mt_tools.bench.timing import alternating, elapsed

MODEL: dict[str, Any] = {
    "family": "qwen_next",
    "num_layers": 8,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 64,
    "ffn_hidden_size": 1280,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "untie_embeddings_and_output_weights": False,
}
BATCH, LENGTH, PROMPT, NEW = 2, 512, 64, 64
GOAL = 1.2


def loaded() -> LoadedConfig:
    model = [f"model.{key}={json.dumps(value)}" for key, value in MODEL.items()]
    keys = {
        "data.seq_length": LENGTH, "inference.cache_memory_gb": 1.0, "inference.prefix_caching": "false",
        "train.micro_batch_size": BATCH, "train.train_iters": 100000, "train.eval_interval": "null",
        "checkpoint.save_interval": "null", "logging.progress": "none",
    }  # fmt: skip
    return load_config(overrides=[*model, *(f"{key}={value}" for key, value in keys.items())])


def our_model() -> tuple[nn.Module, Any]:
    config = loaded().config
    model = build.build_model(config, ParallelContext(device=torch.device("cpu")), load_plugins())
    initialize(model, 1, ParallelContext())
    return model, config


def their_model(ours: nn.Module) -> nn.Module:
    external = HUGGING_FACE.write_config(ours.config)  # type: ignore[arg-type]
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig.from_dict(external)).float()
    model.load_state_dict(to_reference(ours, HUGGING_FACE), strict=False)
    return model


class NoData:
    """Batches are given to the steps."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def describe(self, index: int) -> str:
        return "random ids"


def batch() -> Tensor:
    return torch.randint(0, MODEL["vocab_size"], (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def our_step() -> Callable[[], None]:
    trainer = Trainer(loaded(), train_data=NoData(), valid_data={}, callbacks=[])
    trainer.model.train()
    ids, shape = batch().numpy(), (BATCH, LENGTH)
    fields = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": np.ones(shape, np.float32)}
    fields["position_ids"] = np.tile(np.arange(LENGTH), (BATCH, 1))
    return lambda: trainer.take_step(RankBatch([fields], [range(BATCH)]))


def their_step(model: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = batch()
    targets = ids[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad()
        model(ids[:, :-1], labels=targets, shift_labels=targets, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    model.train()
    return step


def our_decoding(model: nn.Module, config: Any, requests: int) -> Callable[[], None]:
    store_by_columns(model)
    section = config.section(InferenceConfig)
    engine = InferenceEngine(model.eval(), None, ParallelContext(), section, longest=PROMPT + NEW)
    rows = prompts(requests).tolist()

    def decode() -> None:
        for row in rows:
            engine.add(row, SamplingParameters(temperature=0.0, max_tokens=NEW, ignore_eod=True))
        while not engine.is_idle:
            engine.step()

    return decode


def their_decoding(model: Any, requests: int) -> Callable[[], None]:
    ids = prompts(requests)

    @torch.no_grad()
    def decode() -> None:
        model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )

    return decode


def prompts(requests: int) -> Tensor:
    return torch.randint(0, MODEL["vocab_size"], (requests, PROMPT), generator=torch.Generator().manual_seed(2))


def report(name: str, ours: Callable[[], None], theirs: Callable[[], None], rounds: int, tokens: int) -> None:
    calls = {"ours": ours, "theirs": theirs}
    taken = alternating(calls, rounds, measure=lambda call: elapsed(call, time.process_time), warm_up=1)
    ratios = [their / own for their, own in zip(taken["theirs"], taken["ours"], strict=True)]
    speed = tokens / statistics.median(taken["ours"])
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(
        f"{name}: {speed:.0f} tokens/s, {statistics.median(ratios):.2f} of transformers' (goal {GOAL}); rounds {each}"
    )


def profile(call: Callable[[], None]) -> None:
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        call()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["training", "decoding"], default=None)
    parser.add_argument("--profile", action="store_true", help="the operations of one training step, of both")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ours, config = our_model()
    theirs = their_model(ours)
    print(as_line(conditions(threads=1)))
    print(f"{sum(parameter.numel() for parameter in theirs.parameters()) / 1e6:.1f} M parameters")
    if arguments.part != "decoding":
        steps = our_step(), their_step(theirs)
        if arguments.profile:
            for step in steps:
                profile(step)
        report("training", *steps, arguments.rounds, BATCH * LENGTH)
    if arguments.part != "training":
        for requests in (1, 8):
            calls = our_decoding(ours, config, requests), their_decoding(theirs, requests)
            report(f"decoding {requests}", *calls, arguments.rounds, requests * NEW)


if __name__ == "__main__":
    main()

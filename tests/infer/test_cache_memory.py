"""How much memory an engine takes, and which leading blocks it finds there."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tests.infer.engines import configuration, new_model, prompts, run
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_infer.blocks import BlockPool, BlockTable, shared_counts
from mt_infer.cache.manager import CacheManager, build_caches
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.speculation.building import DraftModel
from mt_infer.speculation.draft_model import ModelDrafter

BLOCK = 4


def tensors_of(manager: CacheManager) -> Iterator[Tensor]:
    layers = [(storage.of(layer), storage) for storage in manager.storages for layer in storage.group.layers]
    yield from (store.values[: storage.spare_place] for stores, storage in layers for store in stores)
    if manager.states is not None:
        yield from (tensor for layer, _ in manager.layout.recurrent for tensor in manager.states.of(layer))
    yield from (tensor for snapshot in manager._snapshots.values() for tensor in snapshot)


@pytest.mark.slow
def test_caches_and_snapshots_are_within_the_memory() -> None:
    """Of a model and a draft model with recurrent states, after more prefixes than there are snapshots."""
    memory = 150_000
    inference = {"cache_memory_gb": memory / 2**30, "speculative_method": "draft_model", "cache_block_size": BLOCK}
    config = configuration("hybrid", inference=inference)
    draft = DraftModel(new_model(configuration("hybrid")))
    engine = InferenceEngine(
        new_model(config), None, ParallelContext(), config.section(InferenceConfig), longest=16, draft_model=draft
    )
    run(engine, prompts(*[5] * 70), SamplingParameters(temperature=0.0, max_tokens=2))
    assert isinstance(engine.drafter, ModelDrafter)
    taken = [tensor.nbytes for cache in (engine.manager, engine.drafter.manager) for tensor in tensors_of(cache)]
    assert memory / 2 < sum(taken) <= memory
    assert engine.manager._snapshots


def test_a_memory_for_one_model_is_too_little_for_two() -> None:
    model, ctx = new_model(configuration("gpt2")), ParallelContext()
    options = configuration("gpt2", inference={"max_requests": 1}).section(InferenceConfig)
    manager, none = build_caches(model, None, options, ctx, 16)
    assert none is None
    needed = sum(tensor.nbytes for tensor in tensors_of(manager))
    options = options.model_copy(update={"cache_memory_gb": 1.5 * needed / 2**30})
    build_caches(model, None, options, ctx, 16)
    with pytest.raises(ConfigError, match="does not hold one sequence"):
        build_caches(model, model, options, ctx, 16)


def test_requests_that_wait_have_no_features() -> None:
    """Features of images are computed once for each request, when it is admitted."""
    config = configuration("llava", inference={"max_requests": 2})
    engine = InferenceEngine(new_model(config), None, ParallelContext(), config.section(InferenceConfig), longest=64)
    conditioned: list[None] = []
    condition = engine.runner.condition
    engine.runner.condition = lambda inputs: conditioned.append(None) or condition(inputs)  # type: ignore[assignment,func-returns-value]
    size, model = config.model.vision_model.img_h, config.model
    prompt = [9, *[model.image_token_index] * model.image_seq_length, 8]
    for _ in range(3):
        engine.add(prompt, SamplingParameters(max_tokens=3, n=2), {"images": torch.zeros(1, 3, size, size)})
    assert not conditioned
    while not engine.is_idle:
        engine.step()
        assert all(sequence.conditioning is None for sequence in engine.scheduler.waiting)
    assert len(conditioned) == 3


class CountingPool(BlockPool):
    """Counts how often it is searched."""

    searches = 0

    def find(self, key: bytes) -> int | None:
        self.searches += 1
        return super().find(key)


def holding(keys: list[bytes], window: int | None) -> BlockTable:
    """A table of a pool with these blocks."""
    pool = CountingPool(len(keys) + 1)
    for key in keys:
        pool.name(pool.take(), key)
    return BlockTable(pool, BLOCK, window)


def test_leading_blocks_in_common_are_those_of_the_definition() -> None:
    draw = random.Random(0)
    keys = [bytes([number]) for number in range(12)]
    for _ in range(300):
        windows = draw.choice([[None], [9], [None, 9], [14, 5], [None, 14, 5]])
        held = [{key for key in keys if draw.random() < 0.8} for _ in windows]
        tables = [holding(sorted(own), window) for own, window in zip(held, windows, strict=True)]
        expected = [
            count
            for count in range(12, 0, -1)
            if all(set(keys[table.first_needed(count) : count]) <= own for table, own in zip(tables, held, strict=True))
        ]
        assert list(shared_counts(tables, keys)) == expected


def test_leading_blocks_in_common_are_searched_for_once() -> None:
    keys = [number.to_bytes(2, "big") for number in range(4000)]
    for held in ([], keys[:-1], keys[1:]):
        tables = [holding(held, window) for window in (None, 8000)]
        next(shared_counts(tables, keys), 0)
        assert sum(table.pool.searches for table in tables) <= 2 * len(keys)

"""The caches of an engine, of its model and of a draft model, within the memory that the configuration gives."""

from __future__ import annotations

from torch import nn

from mt_core.config.schema import InferenceConfig
from mt_core.nn.attention_backends.batch_invariant import KEYS
from mt_core.parallel.context import ParallelContext
from mt_infer.cache.agreement import agree
from mt_infer.cache.layout import CacheLimits, cache_layout, split_memory
from mt_infer.cache.manager import CacheManager
from mt_infer.memory import cache_bytes


def build_caches(
    model: nn.Module, draft_model: nn.Module | None, options: InferenceConfig, ctx: ParallelContext, longest: int
) -> tuple[CacheManager, CacheManager | None]:
    """Collective over the ranks of the model, which get caches of the same size. Raises ConfigError for a memory that
    does not hold one sequence."""
    own_limits = CacheLimits(
        cache_bytes(options, ctx.device),
        options.cache_block_size,
        options.max_requests,
        longest,
        options.max_tokens_per_step,
        unread=KEYS if options.batch_invariant else 0,
    )
    axis = ctx.axis("model")
    # The order of the collectives is that of the calls: the model first, then the draft model.
    layout, limits = agree(cache_layout(model, options.cache_dtype), own_limits, axis)
    if draft_model is None:
        return CacheManager(layout, limits, ctx.device, share_prefixes=options.prefix_caching), None
    of_drafts, limits = agree(cache_layout(draft_model), limits, axis)
    # Both within cache_memory_gb.
    own, drafts = split_memory(limits, (layout, of_drafts))
    return (
        CacheManager(layout, own, ctx.device, share_prefixes=options.prefix_caching),
        CacheManager(of_drafts, drafts, ctx.device, share_prefixes=False),
    )

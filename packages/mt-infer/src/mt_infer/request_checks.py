"""What an engine cannot serve: settings, and requests."""

from __future__ import annotations

import torch
from torch import nn

from mt_core.config.schema import InferenceConfig
from mt_core.errors import ConfigError
from mt_core.nn.batch_invariance import require_invariant_products
from mt_core.nn.linear import LinearModule
from mt_core.nn.model import Generates
from mt_core.parallel.context import ParallelContext
from mt_infer.cache.manager import CacheManager
from mt_infer.new_sequences import NewSequences
from mt_infer.requests import Request


def check_request(request: Request, model: Generates, manager: CacheManager, sequences: NewSequences) -> None:
    """Raises ConfigError for a request that the engine cannot serve."""
    _check_inputs(request, model)
    if not request.tokens:
        raise ConfigError("the prompt is empty, and the tokenizer has no id that starts a document")
    if request.sampling.num_beams > 1:
        sequences.stop_text(request.sampling)
        _check_beams(request, manager, sequences.longest)
    # Compiles the constraint, or finds it compiled: an invalid one is refused before the request waits.
    sequences.constraints.matcher(request.sampling)
    # A token that nothing follows takes no position.
    # max_tokens=1 samples from the last position of the prompt alone; max_tokens=0 scores the prompt.
    asked = len(request.tokens) + (1 if request.sampling.max_tokens > 1 else 0)
    if asked > sequences.longest:
        raise ConfigError(
            f"the prompt has {len(request.tokens)} tokens, and sequences have at most {sequences.longest} with what is "
            "generated (inference.max_sequence_length, the model's positions); shorten the prompt"
        )


def _check_inputs(request: Request, model: Generates) -> None:
    known = model.conditioned_by
    unknown = [name for name in request.inputs if name not in known]
    if unknown:
        raise ConfigError(
            f"the model takes no {' or '.join(unknown)} beside tokens; "
            f"it takes {' and '.join(known) if known else 'tokens only'}"
        )
    model.check_request(torch.tensor(request.tokens), request.inputs)


def _check_beams(request: Request, manager: CacheManager, longest: int) -> None:
    """That all beams fit into the cache at once, in the worst case with nothing in common."""
    beams, limits = request.sampling.num_beams, manager.limits
    if beams > limits.max_requests:
        raise ConfigError(
            f"num_beams={beams} is above inference.max_requests={limits.max_requests}, the sequences that are "
            "computed at a time; raise that, or search with fewer beams"
        )
    length = min(len(request.tokens) + request.sampling.max_tokens, longest)
    if not manager.holds(beams, length):
        raise ConfigError(
            f"the cache does not hold num_beams={beams} sequences of {length} positions; raise "
            "inference.cache_memory_gb, or lower num_beams or max_tokens"
        )


def refuse_context_parallel(ctx: ParallelContext) -> None:
    if ctx.cp.size > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={ctx.cp.size} divides sequences, and the cache keeps whole ones; set it "
            "to 1 to generate"
        )


def refuse_invariant_quantization(options: InferenceConfig) -> None:
    if options.batch_invariant and (options.quantize_weights is not None or options.cache_dtype != "auto"):
        raise ConfigError(
            "inference.batch_invariant=true gives the log-probabilities of training, which quantized numbers cannot; "
            "leave inference.quantize_weights and inference.cache_dtype out"
        )


def check_products(model: nn.Module, options: InferenceConfig) -> None:
    """Raises ConfigError, before the first request, where a product with a weight cannot be batch invariant here."""
    if options.batch_invariant:
        linear = [module for module in model.modules() if isinstance(module, LinearModule)]
        require_invariant_products(module.weight.detach().t() for module in linear if module.weight.ndim == 2)

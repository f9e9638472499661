"""Which adapter a kind of layer gets."""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.errors import ConfigError
from mt_tune.adapters.base import Adapter
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.decomposed import DecomposedAdapter, DecomposedExpertsAdapter
from mt_tune.adapters.embedding import EmbeddingAdapter, OutputAdapter, TokenRowsAdapter
from mt_tune.adapters.expert_vectors import ScalingExpertsAdapter, VectorExpertsAdapter
from mt_tune.adapters.experts import ExpertsAdapter, MagnitudeExpertsAdapter, SharedOuterAdapter
from mt_tune.adapters.low_rank import LowRankAdapter, MagnitudeAdapter, RouterAdapter
from mt_tune.adapters.targets import Kind, Layer
from mt_tune.adapters.vectors import ScalingAdapter, VectorAdapter

KINDS: Mapping[str, Mapping[Kind, type[Adapter]]] = {
    "lora": {
        "linear": LowRankAdapter,
        "experts": ExpertsAdapter,
        "router": RouterAdapter,
        "embedding": EmbeddingAdapter,
        "output": OutputAdapter,
    },
    "decomposed": {"linear": DecomposedAdapter, "experts": DecomposedExpertsAdapter},
    "dora": {"linear": MagnitudeAdapter, "experts": MagnitudeExpertsAdapter},
    "vera": {"linear": VectorAdapter, "experts": VectorExpertsAdapter},
    "ia3": {"linear": ScalingAdapter, "experts": ScalingExpertsAdapter},
    "trainable_tokens": {"embedding": TokenRowsAdapter},
}


def name_of(options: AdapterConfig) -> str:
    return "decomposed" if options.init in ("pissa", "olora") else options.type


def main_type(options: AdapterConfig) -> type[Adapter]:
    """The adapter whose keys describe all of a model."""
    return next(iter(KINDS[name_of(options)].values()))


def adapter_type(layer: Layer, options: AdapterConfig) -> type[Adapter]:
    """Raises ConfigError for a layer that the configured adapters do not serve."""
    adapter_class = KINDS[name_of(options)].get(layer.kind)
    if adapter_class is None:
        init = f" with adapter.init={options.init}" if name_of(options) == "decomposed" else ""
        raise ConfigError(
            f"adapter.targets selects {layer.path} ({layer.kind}), which adapter.type={options.type}{init} does not "
            "serve; add it to adapter.excluded"
        )
    return (
        SharedOuterAdapter if adapter_class is ExpertsAdapter and options.experts == "shared_outer" else adapter_class
    )

"""What a model gets while it is built, beside its own configuration: the layout, the plugins, the whole config."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionCore
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import AttentionRequest


@dataclass(frozen=True)
class ModelEnvironment:
    """Passed to `ModelSpec.build`; asks the plugin host for the parts that other plugins bring."""

    config: Config
    parallel: ParallelContext
    host: PluginHost

    def attention(
        self,
        backend: str,
        *,
        num_heads: int,
        num_query_groups: int,
        head_dim: int,
        dropout: float = 0.0,
        causal: bool = True,
        bias: bool = False,
        window: int | None = None,
        logit_softcap: float | None = None,
    ) -> AttentionCore:
        """The core of the named backend. Raises ConfigError, with the backend's reason, if it cannot serve."""
        request = AttentionRequest(
            device_type=self.parallel.device.type,
            dtype=str(self.parallel.params_dtype).removeprefix("torch."),
            head_dim=head_dim,
            num_heads=num_heads,
            num_query_groups=num_query_groups,
            causal=causal,
            segments=self.config.data.reset_attention_mask,
            bias=bias,
            dropout=dropout,
            deterministic=self.config.train.deterministic,
            window=window,
            logit_softcap=logit_softcap,
        )
        spec = self.host.attention_backends.get(backend, key="model.attention_backend")
        answer = spec.supports.load()(request)
        if answer is not True:
            able = [s.name for s in self.host.attention_backends if s.supports.load()(request) is True]
            use = f"use {' or '.join(able)}" if able else "no installed backend can"
            raise ConfigError(f"model.attention_backend={backend} cannot serve this model: {answer}; {use}")
        return spec.build.load()(request, softmax_in_fp32=self.config.precision.attention_softmax_in_fp32)

    def feed_forward(self, name: str, options: object) -> nn.Module:
        """The named feed-forward. `options` is the model's config, from which it reads its shape."""
        spec = self.host.feed_forwards.get(name, asker=f"model.{name}")
        return spec.build.load()(options, self.parallel)

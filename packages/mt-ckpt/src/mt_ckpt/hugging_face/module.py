"""A module of transformers in memory as a canonical checkpoint: its weights without a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from mt_ckpt.hugging_face.family import identify
from mt_ckpt.hugging_face.reader import HuggingFaceReader
from mt_ckpt.safetensors_files import TensorInfo
from mt_core.config_map import tokenizer_section
from mt_core.plugins import PluginHost


class PreTrainedConfigLike(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


class PreTrainedModelLike(Protocol):
    """A `transformers.PreTrainedModel`."""

    @property
    def config(self) -> PreTrainedConfigLike: ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


class ModuleTensors:
    """The state dict of a module, under its own names (see ExternalTensors)."""

    def __init__(self, module: PreTrainedModelLike) -> None:
        self._state = module.state_dict()
        # state_dict has tied parameters under each of their names, as files may have.
        self.infos = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in self._state.items()}

    def read(self, name: str) -> Tensor:
        return self._state[name].detach().cpu().contiguous()


def read_module(module: PreTrainedModelLike, host: PluginHost) -> HuggingFaceReader:
    """The weights of a transformers model under canonical names; `metadata["config"]` has its [model] and [tokenizer].

    The reader looks at the module's memory: it is to be kept until the weights are read. Raises ConfigError for a
    model_type without a name map, and CheckpointError for tensors that do not fit its configuration.
    """
    # The class is the architecture, also of a module that was built and not loaded.
    external = {**module.config.to_dict(), "architectures": [type(module).__name__]}
    tensors = ModuleTensors(module)
    family, config = identify(external, tensors.infos, host)
    model = {"family": family.family, **config.model.model_dump(mode="json", exclude_defaults=True)}
    sections = {"model": model, "tokenizer": tokenizer_section(external, config.model.vocab_size)}
    return HuggingFaceReader(tensors, family, config.model, {"iteration": 0, "config": sections}, {})

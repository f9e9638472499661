"""Megatron's arguments, which its checkpoints contain.

All of them are kept as they are in the reader's metadata under `megatron.args`. What they mean for the model is in
`families`, what they say of the run in `run_arguments`, and `argument_list` lists every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import CheckpointError


@dataclass(frozen=True)
class Arguments:
    """The attributes of Megatron's Namespace, of the file `origin`."""

    values: Mapping[str, Any]
    origin: Path

    def get(self, name: str, default: Any = None) -> Any:
        """The argument, or `default` where a version does not have it or it is None."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, *names: str) -> Any:
        """The first of the arguments that is there. Raises CheckpointError when none is."""
        for name in names:
            if (value := self.values.get(name)) is not None:
                return value
        raise CheckpointError(f"{self.origin}: its args do not have {' or '.join(names)}")

    @property
    def tensor_parallel(self) -> int:
        # model_parallel_size is the name in Megatron-LM before pipeline parallelism.
        return int(self.get("tensor_model_parallel_size", self.get("model_parallel_size", 1)))

    @property
    def pipeline_parallel(self) -> int:
        return int(self.get("pipeline_model_parallel_size", 1))

    @property
    def expert_parallel(self) -> int:
        return int(self.get("expert_model_parallel_size", 1))

    @property
    def expert_tensor_parallel(self) -> int:
        return int(self.get("expert_tensor_parallel_size", self.tensor_parallel))

    @property
    def untied(self) -> bool:
        return bool(self.get("untie_embeddings_and_output_weights", False))

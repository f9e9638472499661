"""Asks the real Megatron-Core what it computes from a checkpoint: one process for a whole session, jobs over a pipe."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

SERVER = Path(__file__).parent / "megatron_process" / "server.py"
START_SECONDS, JOB_SECONDS = 600.0, 240.0


class MegatronError(AssertionError):
    """Megatron failed, or loaded what it was given only after a strict load had failed. The text ends its log."""


@dataclass(frozen=True)
class Answer:
    """What Megatron says of a model.

    logits: [batch, sequence, padded vocabulary]. token_losses: [batch, sequence], its own cross entropy, which runs
    over the padded vocabulary. step_losses: the mean loss of each training step, before its update. num_parameters:
    of the first rank of the last stage. weights: by its own names, of the same rank, with the number of the chunk
    before them; only where they were asked for.
    """

    padded_vocab_size: int
    num_parameters: int
    iteration: int
    logits: Tensor | None = None
    token_losses: Tensor | None = None
    binary_logits: Tensor | None = None
    step_losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        assert self.token_losses is not None
        return float(self.token_losses.mean())


class Megatron:
    """A started process. `version` is Megatron-Core's."""

    def __init__(self, python: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        self._log = TemporaryDirectory(prefix="mt-peer-")
        self._errors = Path(self._log.name) / "server.log"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self.version: str = self._answer(START_SECONDS)["version"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.cleanup()

    def ask(
        self,
        family: str,
        *,
        arguments: Sequence[str] = (),
        world_size: int = 1,
        load: Path | None = None,
        load_format: str = "torch_dist",
        load_optimizer: bool = False,
        inputs: Mapping[str, Tensor] | None = None,
        num_steps: int = 0,
        save: Path | None = None,
        save_format: str = "torch_dist",
        weights: bool = False,
        double: bool = False,
    ) -> Answer:
        """Build a model, load a checkpoint into it, compute, train and save, in that order, as far as asked for.

        family: gpt (with experts and latent attention too), hybrid, local_hybrid, bert or t5. arguments: Megatron's
        command line; with `load` only the layout over ranks and the training are needed, the model is the checkpoint's.
        inputs: tokens and labels [batch, sequence], for bert also types, for t5 decoder_tokens; a row is a micro-batch,
        and the rows of the batch are sharded over data parallel ranks. num_steps: each on all of `inputs`. double:
        logits are computed in fp64, from the fp32 weights that were loaded.

        Raises MegatronError with the end of the log where any rank fails, and where a strict load does.
        """
        request = {
            "family": family,
            "arguments": list(arguments),
            "world_size": world_size,
            "load": str(load) if load else None,
            "load_format": load_format,
            "load_optimizer": load_optimizer,
            "inputs": dict(inputs or {}),
            "num_steps": num_steps,
            "save": str(save) if save else None,
            "save_format": save_format,
            "weights": weights,
            "double": double,
        }
        return Answer(**self._run(request))

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        with TemporaryDirectory(prefix="mt-peer-job-") as name:
            folder = Path(name)
            torch.save(request, folder / "request.pt")
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"folder": name}) + "\n")
            self._process.stdin.flush()
            error = self._answer(JOB_SECONDS)["error"]
            if error:
                raise MegatronError(error)
            answer: dict[str, Any] = torch.load(folder / "result.pt", weights_only=True)
            return answer

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise MegatronError(f"Megatron's process does not answer:\n{self._errors.read_text()[-6000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

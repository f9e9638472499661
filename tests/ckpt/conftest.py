"""Shared by the checkpoint tests: small states, a check of everything in a checkpoint, forked children."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mt_ckpt.model import expected_parameters
from mt_ckpt.native.manifest import read_manifest
from mt_ckpt.native.read import find_damage, open_checkpoint
from mt_ckpt.native.save import save_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import config_from_dict
from mt_core.plugins import PluginHost, load_plugins
from mt_core.testing import rank_context

State = dict[str, torch.Tensor]
VOCAB = b'{"a": 1}' * 100


def make_state(value: float) -> State:
    """Half a MiB of tensors that all hold `value`, of each element size."""
    state: State = {f"model.layers.{i}.weight": torch.full((128, 128), value) for i in range(6)}
    state |= {f"optimizer.exp_avg.{i}": torch.full((1000,), value, dtype=torch.float64) for i in range(3)}
    state["model.bias"] = torch.full((33,), value, dtype=torch.bfloat16)
    state["rng"] = torch.full((101,), value, dtype=torch.uint8)
    return state


class Kit:
    """What the tests do over and over. The states are made once, so that a forked child only writes."""

    def __init__(self) -> None:
        self.states = {value: make_state(float(value)) for value in (1, 2)}

    def save(self, path: Path, value: int) -> None:
        """A checkpoint in several shards, whose metadata holds the value, too."""
        metadata = {"iteration": value, "config": {"model": {"family": "gpt"}}}
        files = {"tokenizer/vocab.json": VOCAB, "note.txt": b""}
        save_checkpoint(path, self.states[value].items(), metadata, files, max_shard_bytes=1 << 17)

    def assert_whole(self, path: Path) -> int:
        """Opens, verifies and reads all of a checkpoint made by `save`; returns its value."""
        reader = open_checkpoint(path)
        assert find_damage(path, read_manifest(path)) == []
        value = reader.metadata["iteration"]
        assert list(reader.shapes()) == list(self.states[value])
        for name, tensor in self.states[value].items():
            assert torch.equal(reader.read(name), tensor), name
        assert reader.files() == {"tokenizer/vocab.json": VOCAB, "note.txt": b""}
        return value

    @staticmethod
    def in_child(work: Callable[[], object], kill_after: float | None = None) -> int:
        """Run `work` in a forked child, kill it with SIGKILL after some seconds if asked; returns its exit code.

        The code is 0 after `work`, 1 (with a traceback on stderr) when it raised, -9 when it was killed.
        """
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture
def saved(tmp_path: Path, kit: Kit) -> Path:
    """A committed checkpoint with the value 1 in a run directory, alone in it."""
    path = tmp_path / "run" / "checkpoints" / "iter_0000001"
    kit.save(path, 1)
    return path


@pytest.fixture
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For conversions, which take twice as long otherwise; what a power failure leaves is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# -- models of every family, for conversion ---------------------------------------------------------


@pytest.fixture(scope="session")
def host() -> PluginHost:
    return load_plugins()


@pytest.fixture
def make_model(host: PluginHost, tmp_path: Path) -> Callable[..., Path]:
    """A function that saves a model with random weights in mt's own format and returns the checkpoint's path."""

    def make(name: str = "source", *, iteration: int = 3, optimizer: bool = False, dtype=torch.float32, **keys) -> Path:
        config = config_from_dict({"model": keys, "tokenizer": NULL_TOKENIZER}, host)
        state = random_weights(expected_parameters(config, host), seed=iteration, dtype=dtype)
        if optimizer:
            state |= {
                name.replace("model.", f"optimizer.{kind}."): 2 * value
                for name, value in state.items()
                for kind in ("exp_avg", "exp_avg_sq")
            }
        metadata = {"iteration": iteration, "config": config.to_dict()}
        save_checkpoint(tmp_path / name, state.items(), metadata, {})
        return tmp_path / name

    return make


NULL_TOKENIZER = {"tokenizer_type": "NullTokenizer", "vocab_size": 50}


def random_weights(layouts, *, seed: int, dtype: torch.dtype) -> State:
    """Far from initial values and different everywhere, so that no two tensors can be taken for one another."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("token_experts"):  # numbers of experts
            return torch.randint(-256, -252, shape, generator=generator).float()
        return (0.3 * torch.randn(shape, generator=generator)).to(dtype)

    return {f"model.{name}": drawn(name, layout.shape) for name, layout in layouts.items()}


def tensors_of(reader: CheckpointReader) -> State:
    return {name: reader.read(name) for name in reader.shapes()}


def assert_same_state(first: State, second: State) -> None:
    """The same names, dtypes, shapes and bits."""
    assert set(first) == set(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from the server of ranks rather than spawned, which takes each of them two seconds of imports.
    What they do is the same; spawned ones are in test_convert_processes.py: of two processes and of what is killed."""
    context = rank_context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)

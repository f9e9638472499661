"""Saving and loading a checkpoint: mt's own format against raw file I/O, torch.save and torch's distributed one.

    python bench/checkpoint.py [--mib 1024] [--rounds 5] [--folder DIR]

The tensors are those of a transformer's weights and two Adam moments in fp32. In every round each method
writes the same bytes (fsynced: files and directory, for all of them) and reads them back, in an order
that changes from round to round. Reading is done twice: with the files dropped from the page cache
(`posix_fadvise`), and once more from the cache, each time into memory fresh from the system, as a new
process does. The table gives the median time of each method and the medians over the rounds of its rate
relative to the raw one of the same round, and of mt's rate relative to its.

Raw: one file written in blocks of 4 MiB and fsynced; read in blocks into freshly allocated memory.

Asynchronous saving: how long training stands still, that is until `AsyncCheckpointWriter.write` returns, against a copy
of the same tensors into memory that was used before. The first save also gets its memory from the system.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.save import ShardedSave, save_checkpoint
from mt_core.config.schema import CheckpointConfig
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.plugins import load_plugins
from mt_core.train.checkpoint.local_shards import whole_fragment
from mt_core.train.checkpoint.run_directory import RunDirectory
from mt_core.train.checkpoint.saving import AsyncCheckpointWriter, CheckpointContents, Commit, ShardedMethod
from mt_tools.bench.report import as_line, conditions
from mt_tools.bench.timing import elapsed

BLOCK = 4 << 20
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Method:
    name: str
    save: Callable[[Path, State], None]
    load: Callable[[Path, State], State]


# -- the methods ------------------------------------------------------------------------------------


def save_raw(path: Path, state: State) -> None:
    path.mkdir()
    with (path / "raw").open("wb", buffering=0) as stream:
        for tensor in state.values():
            data = raw_bytes(tensor)
            for start in range(0, len(data), BLOCK):
                stream.write(data[start : start + BLOCK])


def load_raw(path: Path, like: State) -> State:
    state = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    with (path / "raw").open("rb", buffering=0) as stream:
        for tensor in state.values():
            data = raw_bytes(tensor)
            for start in range(0, len(data), BLOCK):
                stream.readinto(data[start : start + BLOCK])
    return state


def save_torch(path: Path, state: State) -> None:
    path.mkdir()
    torch.save(state, path / "state.pt")


def load_torch(path: Path, like: State) -> State:
    return torch.load(path / "state.pt", weights_only=True)


def save_dcp(path: Path, state: State) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False), no_dist=True)


def load_dcp(path: Path, like: State) -> State:
    state = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def save_mt(path: Path, state: State) -> None:
    save_checkpoint(path, state.items(), {}, {})


def load_mt(path: Path, like: State) -> State:
    reader = open_checkpoint(path)
    return {name: reader.read(name) for name in reader.shapes()}


METHODS = (
    Method("raw", save_raw, load_raw),
    Method("mt", save_mt, load_mt),
    Method("torch.save", save_torch, load_torch),
    Method("torch dcp", save_dcp, load_dcp),
)


# -- measuring --------------------------------------------------------------------------------------


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def make_state(mib: int) -> State:
    """Weights and two moments: a few large matrices, a matrix and a vector for each layer."""
    elements = mib * (1 << 20) // 4 // 3
    generator = torch.Generator().manual_seed(0)
    hidden = 1024
    num_layers = max(elements * 3 // 4 // (hidden * hidden * 4 + hidden), 1)
    vocab = max((elements - num_layers * (hidden * hidden * 4 + hidden)) // hidden, 1)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocab, hidden)}
    for layer in range(num_layers):
        shapes[f"layers.{layer}.fc"] = (4 * hidden, hidden)
        shapes[f"layers.{layer}.norm"] = (hidden,)
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return {f"{kind}.{n}": torch.randn(shape, generator=generator) for kind in kinds for n, shape in shapes.items()}


def sync_all(path: Path) -> None:
    """fsync every file and directory; what a method has synced already costs nothing more."""
    for folder, _, names in os.walk(path):
        for name in [*names, "."]:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def drop_from_cache(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def always_take_fresh_memory() -> None:
    """Otherwise the C library gives some loads memory that an earlier one has touched, which is twice as fast."""
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20)


def one_round(folder: Path, state: State, methods: list[Method]) -> dict[tuple[str, str], float]:
    seconds = {}
    for method in methods:
        path = folder / method.name.replace(" ", "-")

        def save(method: Method = method, path: Path = path) -> None:
            method.save(path, state)
            sync_all(path)

        seconds[method.name, "save"] = elapsed(save)
        drop_from_cache(path)
        load = partial(method.load, path, state)
        seconds[method.name, "load, cold"] = elapsed(load)
        seconds[method.name, "load, cached"] = elapsed(load)
        shutil.rmtree(path)
    return seconds


def copy_into(target: State, state: State) -> None:
    for name, tensor in state.items():
        target[name].copy_(tensor)


def stalls(folder: Path, state: State, rounds: int) -> tuple[float, list[tuple[float, float]]]:
    """Seconds of the first stall, and in each round of a stall and of the copy, measured one after the other."""
    directory = RunDirectory(folder / "run")
    directory.create()
    config = CheckpointConfig(async_save=True, keep_last=1)
    commit = Commit(directory, config, load_plugins())
    ctx = build_parallel_context(AxisSizes())
    writer = AsyncCheckpointWriter(ShardedMethod(ShardedSave(), commit, ctx), 1, ctx)
    contents = CheckpointContents([whole_fragment(name, tensor) for name, tensor in state.items()], {}, {})
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def save(iteration: int) -> float:
        seconds = elapsed(lambda: writer.write(directory.checkpoint(iteration), contents))
        writer.finish()
        return seconds

    first = save(0)
    pairs = [(save(number), elapsed(lambda: copy_into(target, state))) for number in range(1, rounds + 1)]
    writer.close()
    return first, pairs


def report_stalls(first: float, pairs: list[tuple[float, float]]) -> None:
    stall, copy = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(stall / copy for stall, copy in pairs)
    print(f"\nasynchronous save: stall {stall:.3f} s, memory copy {copy:.3f} s, median ratio {ratio:.2f}")
    print(f"the first one, with new memory: stall {first:.3f} s")


def check(folder: Path, state: State) -> None:
    """Every method must give back what it was given, else its time means nothing."""
    small = {name: tensor[:8].clone() for name, tensor in list(state.items())[:4]}
    for method in METHODS:
        path = folder / "check"
        method.save(path, small)
        loaded = method.load(path, small)
        if any(not torch.equal(loaded[name], tensor) for name, tensor in small.items()):
            raise SystemExit(f"{method.name} does not return what it saved")
        shutil.rmtree(path)


def report(rounds: list[dict[tuple[str, str], float]], num_bytes: int) -> None:
    for what in ("save", "load, cold", "load, cached"):
        print(f"\n{what:14} {'median s':>9} {'GiB/s':>7} {'rate / raw':>11} {'mt / rate':>10}")
        for method in METHODS:
            seconds = [r[method.name, what] for r in rounds]
            ratios = [r["raw", what] / r[method.name, what] for r in rounds]
            over = statistics.median(r[method.name, what] / r["mt", what] for r in rounds)
            rate = num_bytes / 2**30 / statistics.median(seconds)
            columns = f"{statistics.median(seconds):9.3f} {rate:7.2f} {statistics.median(ratios):11.2f} {over:10.2f}"
            print(f"{method.name:14} {columns}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=1024, help="bytes of all tensors, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary directory)")
    options = parser.parse_args()
    always_take_fresh_memory()
    state = make_state(options.mib)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    print(f"{num_bytes / 2**20:.0f} MiB in {len(state)} fp32 tensors, {options.rounds} rounds, every save fsynced")
    print(as_line(conditions(torch=torch.__version__)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        check(Path(folder), state)
        rounds = []
        for number in range(options.rounds):
            # Each method is first, second ... as often as the others: what precedes a save leaves work for the disk.
            shift = number % len(METHODS)
            rounds.append(one_round(Path(folder), state, [*METHODS[shift:], *METHODS[:shift]]))
        first, pairs = stalls(Path(folder), state, options.rounds)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    report(rounds, num_bytes)
    report_stalls(first, pairs)


if __name__ == "__main__":
    main()

"""Launches, bytes moved and activation memory of a Llama 3 8B layer, bf16, one sequence of 8192, on the meta device.

    uv venv --python 3.12 PEERS
    uv pip install --python PEERS/bin/python "megatron-core>=0.19,<0.20" torchtitan torch einops
    uv run python bench/layer_counts.py --peer-python PEERS/bin/python
    uv run python bench/layer_counts.py --preset qwen3-8b --set kernels.rms_norm=torch
    uv run python bench/layer_counts.py --preset qwen3-8b --separate

What a layer adds: two layers less one, each forward and backward. All have the same fused attention: its inputs, its
output and one number a row are saved, one launch each way. Bytes are those of the tensors that launches other than
products and attention are given and give.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "layers"))
from counting import Launches, count

OURS, PEERS = "mt_layers", ("megatron_core_layers", "torchtitan_layers")


def counted(contender: str, layers: int, *options: str, **named: bool) -> None:
    """In a process of its own: prints the counts as JSON."""
    launches = Launches()
    model, run, hidden = importlib.import_module(contender).build(launches, layers, *options, **named)
    print(json.dumps(count(launches, model, run, hidden)))


def measured(contender: str, python: Path, layers: int, options: list[str]) -> dict[str, dict[str, int]]:
    command = [str(python), __file__, "--contender", contender, "--layers", str(layers), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{contender} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def show(contender: str, python: Path, *options: str, verbose: bool) -> None:
    one, two = (measured(contender, python, layers, list(options)) for layers in (1, 2))
    passes = {name: Counter(two[name]) - Counter(one[name]) for name in ("forward", "backward")}
    kept, moved = ((two[name] - one[name]) / 2**20 for name in ("bytes", "moved"))  # type: ignore[operator]
    launches = ", ".join(f"{sum(names.values())} launches {name}" for name, names in passes.items())
    print(f"{contender}: {launches}, {moved:.0f} MiB moved, {kept:.0f} MiB saved")
    for name, names in passes.items() if verbose else ():
        print(f"    {name}: {dict(names.most_common())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--verbose", action="store_true", help="Launches by name.")
    parser.add_argument("--preset", default="llama3-8b", help="Of ours.")
    parser.add_argument("--set", action="append", default=[], help="A setting of ours, such as kernels.rotary=torch.")
    parser.add_argument(
        "--separate", action="store_true", help="Ours without kernels that join norms or activations with the next one."
    )
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender == OURS:
        counted(OURS, arguments.layers, arguments.preset, *arguments.set, separate=arguments.separate)
        return
    if arguments.contender:
        counted(arguments.contender, arguments.layers)
        return
    settings = [word for setting in arguments.set for word in ("--set", setting)]
    settings += ["--separate"] if arguments.separate else []
    show(OURS, Path(sys.executable), "--preset", arguments.preset, *settings, verbose=arguments.verbose)
    for peer in PEERS if arguments.peer_python else ():
        show(peer, arguments.peer_python, verbose=arguments.verbose)


if __name__ == "__main__":
    main()

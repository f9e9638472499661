"""The harness: Megatron resumes its own runs here as it does elsewhere, over ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.peer.megatron import Megatron, MegatronError

MODEL = [
    "--num-layers=4",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--max-position-embeddings=16",
    "--seq-length=16",
    "--padded-vocab-size=128",
    "--vocab-size=101",
    "--global-batch-size=4",
]
TOKENS = torch.randint(0, 101, (4, 17), generator=torch.Generator().manual_seed(0))
INPUTS = {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}
LAYOUTS = {
    "one rank": (1, []),
    "tensor": (2, ["--tensor-model-parallel-size=2", "--sequence-parallel"]),
    "virtual pipeline": (2, ["--pipeline-model-parallel-size=2", "--num-virtual-stages-per-pipeline-rank=2"]),
    "data": (2, ["--use-distributed-optimizer"]),
}


@pytest.mark.parametrize(
    ("layout", "save_format"),
    [("one rank", "torch"), ("tensor", "torch_dist"), ("virtual pipeline", "torch"), ("data", "torch_dist")],
)
def test_a_resumed_run_computes_what_the_undisturbed_one_does(
    megatron: Megatron, tmp_path: Path, layout: str, save_format: str
) -> None:
    world_size, arguments = LAYOUTS[layout]
    more = {"world_size": world_size, "inputs": INPUTS}
    undisturbed = megatron.ask("gpt", arguments=[*MODEL, *arguments], num_steps=3, **more)
    megatron.ask(
        "gpt", arguments=[*MODEL, *arguments], num_steps=1, save=tmp_path / "run", save_format=save_format, **more
    )
    resumed = megatron.ask(
        "gpt",
        arguments=[*arguments, "--global-batch-size=4"],
        load=tmp_path / "run",
        load_format=save_format,
        load_optimizer=True,
        num_steps=2,
        **more,
    )
    assert resumed.iteration == 1
    torch.testing.assert_close(resumed.step_losses, undisturbed.step_losses[1:], rtol=0, atol=1e-6)


def test_a_load_that_is_not_strict_is_an_error(megatron: Megatron, tmp_path: Path) -> None:
    run = tmp_path / "run"
    megatron.ask("gpt", arguments=MODEL, inputs=INPUTS, save=run, save_format="torch")
    with pytest.raises(MegatronError, match="q_layernorm"):
        megatron.ask("gpt", arguments=["--qk-layernorm"], load=run, load_format="torch", inputs=INPUTS)

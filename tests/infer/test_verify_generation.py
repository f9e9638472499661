"""`mt verify generation`: all ways of computing agree, and a way that does not is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ckpt.convert_cases import MODELS
from tests.command_on_ranks import fork_ranks
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn
from tests.infer.engines import configuration, prompts

from mt_cli import main
from mt_core.errors import CheckpointError
from mt_core.nn.batch_invariance import is_batch_invariant
from mt_core.nn.layout import initialize
from mt_core.plugins import load_plugins
from mt_core.train import build
from mt_core.train.pipelining import build_stages
from mt_core.train.trained_model import TrainedModel
from mt_data.tokenizers.null import NullConfig, NullTokenizer
from mt_infer.cache.storage import PlainStore
from mt_infer.quantization.weights import QuantizedWeight
from mt_infer.runner import placed_stages
from mt_infer.speculation.draft_model import ModelDrafter
from mt_infer.verify_generation import Difference, Outcome, compare, compare_ways, require_finite

pytestmark = pytest.mark.slow
SMALL = (
    "--max-tokens",
    5,
    "--prompt",
    "import os",
    "--prompt",
    "import os and more than that",
    "--set",
    "inference.cache_memory_gb=0.05",
)
INVARIANT = ("--set", "numerics.batch_invariant=true")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    settings = (
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.num_attention_heads=4",
        "data.seq_length=64",
        "data.corpus_bytes=1000000",
        "train.micro_batch_size=2",
        "train.train_iters=2",
        "train.eval_iters=1",
        "train.num_threads=1",
        "train.sample_prompt=null",
        "lr_schedule.lr_warmup_iters=1",
        "logging.progress=none",
    )
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert main.run(["train", "--run-dir", str(folder / "run"), *arguments]) == 0
    return str(folder / "run")


def test_without_the_key_the_largest_difference_is_reported(mt, run) -> None:
    done = mt("verify", "generation", run, *SMALL)
    assert done.code == 0, done.err
    assert "2 requests of 5 tokens: within 0.001" in done.out


def test_every_way_gives_the_same_bits(mt, run) -> None:
    done = mt("verify", "generation", run, *SMALL, *INVARIANT)
    assert done.code == 0, done.out
    assert done.out.count("no difference") == 5
    assert "2 requests of 5 tokens: the same bits" in done.out


def test_the_engine_is_the_one_that_is_served(mt, run, monkeypatch) -> None:
    """With quantized weights, and with a draft model where the configuration names one."""
    used = set()

    def record(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def recorded(*args):
            used.add(owner)
            return real(*args)

        monkeypatch.setattr(owner, name, recorded)

    record(QuantizedWeight, "forward")
    record(ModelDrafter, "propose")
    served = {"quantize_weights": "int8", "speculative_method": "draft_model", "speculative_model": run}
    keys = [part for key, value in served.items() for part in ("--set", f"inference.{key}={value}")]
    done = mt("verify", "generation", run, *SMALL, *keys)
    assert done.code == 0, done.err
    assert used == {QuantizedWeight, ModelDrafter}


def test_more_tokens_than_positions_are_a_sentence(mt, run) -> None:
    done = mt("verify", "generation", run, "--max-tokens", 64)
    assert done.code == 2
    assert "--max-tokens 64 leaves no position for a prompt: sequences have at most 64" in done.err


LAYOUTS = {
    "TP 2": ("llama", 2, {"tensor_model_parallel_size": 2}),
    "EP 2": ("mixtral", 2, {"expert_model_parallel_size": 2}),
    "PP 3": ("qwen2", 3, {"pipeline_model_parallel_size": 3}),
    "TP 2 and PP 2 of two stages each": (
        "llama",
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_schedule": "interleaved_1f1b",
        },
    ),
}


def verified(rank: int, world: int, layout: str) -> list[Difference]:
    """From a first prompt of 3 tokens, in a process that has computed nothing."""
    name, _, parallel = LAYOUTS[layout]
    model = {**MODELS[name], "num_layers": 4, **({"moe": EXPERTS} if name == "mixtral" else {})}
    config = configuration(model, parallel=parallel, inference={"batch_invariant": True})
    ctx = build.build_context(config, torch.device("cpu"))
    stages = build_stages(config, ctx, load_plugins())
    built = build.build_model(config, ctx, load_plugins(), None if stages is None else stages.own).eval()
    initialize(built, 1, ctx)
    trained = TrainedModel(built, NullTokenizer(NullConfig(vocab_size=100)), config, Path(), 0, ctx, stages)
    return compare_ways(trained, placed_stages(stages, ctx), prompts(3, 3, 21), 4, 0)


EXPERTS = {"num_experts": 4, "moe_router_topk": 2}
IN_ANOTHER = "TP 2"
"""Four ranks have the same with stages."""
VERIFIED = InTurn(verified, [(world, layout) for layout, (_, world, _) in LAYOUTS.items() if layout != IN_ANOTHER])


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=EXHAUSTIVE if layout == IN_ANOTHER else ()) for layout in LAYOUTS]
)
def test_layouts_give_the_same_bits_as_their_training(layout: str) -> None:
    found = VERIFIED.result(LAYOUTS[layout][1], layout)
    assert [(one.way, one.place) for one in found] == [
        ("together", None),
        ("in chunks of 7", None),
        ("with prefixes of others", None),
        ("with preemption", None),
        ("training's forward pass", None),
    ]


@pytest.mark.dist
def test_the_line_of_training_is_printed_in_pipelines(mt, run, monkeypatch) -> None:
    fork_ranks(monkeypatch)
    layout = ("--nproc", 2, "--set", "parallel.pipeline_model_parallel_size=2")
    done = mt("verify", "generation", run, *SMALL, *INVARIANT, *layout)
    assert done.code == 0, done.err
    assert "training's forward pass: no difference" in done.out
    assert done.out.count("no difference") == 5


def test_a_way_that_differs_is_named(mt, run, monkeypatch) -> None:
    """A cache that forgets the last bit of what it reads."""
    real = PlainStore.read

    def rounded(store, places):
        found = real(store, places)
        return found * (1 + 2**-23) if is_batch_invariant() and len(found) > 12 else found

    monkeypatch.setattr(PlainStore, "read", rounded)
    done = mt("verify", "generation", run, *SMALL, *INVARIANT)
    assert done.code == 1
    assert "in chunks of 7: the same tokens, log-probabilities off by up to" in done.out
    assert "NOT the same bits" in done.out


def test_the_first_difference_is_reported() -> None:
    prompts = [[1, 2], [1, 2, 3]]
    first = [Outcome((5, 6), (-1.0, -2.0, -3.0)), Outcome((7, 8), (-1.0, -2.0, -3.0, -4.0))]
    other = [first[0], Outcome((7, 9), (-1.0, -2.0, -3.5, -9.0))]
    assert compare("same", first, first, prompts).place is None
    found = compare("other", other, first, prompts)
    assert (found.request, found.place, found.off, found.tokens_differ) == (1, 3, 0.5, True)
    assert torch.tensor(found.off).isfinite()


def test_what_is_not_finite_is_an_error_and_never_the_same() -> None:
    with pytest.raises(CheckpointError, match="together: the log-probability at position 2 of request 0 is nan"):
        require_finite("together", [Outcome((5, 6), (-1.0, float("nan")))])
    assert Difference("same").is_allowed(0.0)
    assert not Difference("other", request=0, place=2).is_allowed(0.0)

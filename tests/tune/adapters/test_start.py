"""What adapters start from: the weights of the base, a PEFT folder; and a run that is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tune.adapters.models import InMemory, adapted, base_of, write_peft

from mt_ckpt.native.convert import convert_checkpoint
from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins
from mt_core.train import Trainer
from mt_tune.adapters.decomposed import decomposed
from mt_tune.adapters.merge import MergedCheckpoint

pytestmark = pytest.mark.slow
MODEL = {
    "family": "llama", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 48, "vocab_size": 263, "max_position_embeddings": 16,
}  # fmt: skip
SETTINGS = (
    "data.seq_length=16", "data.corpus_bytes=1000000", "train.micro_batch_size=2", "train.global_batch_size=2",
    "train.eval_interval=null", "train.eval_iters=1", "lr_schedule.lr_warmup_iters=0", "logging.progress=none",
    "train.sample_prompt=null", "checkpoint.save_interval=2", "train.deterministic=true", *(
        f"model.{key}={value}" for key, value in MODEL.items()
    ),
)  # fmt: skip
FC2 = "decoder.layers.0.mlp.linear_fc2"


@pytest.fixture(scope="module")
def host():
    return load_plugins()


@pytest.fixture(scope="module")
def base(host, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base") / "checkpoint"
    reader = base_of(host, MODEL)
    convert_checkpoint(
        path, InMemory({"model": MODEL}, {n[6:]: v for n, v in reader.values.items()}), ConvertOptions(), host
    )
    return path


def train(host, base: Path, run_dir: Path, steps: int, *keys: str):
    config = load_config(
        overrides=[*SETTINGS, f"checkpoint.load={base}", *keys, f"train.exit_iteration={steps}"], host=host
    )
    trainer = Trainer(config, run_dir=run_dir, host=host)
    trainer.train()
    return trainer, open_checkpoint(find_checkpoint(run_dir), host)


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_a_decomposition_is_the_base_at_first_and_twice_the_rank_when_exported(host, base, tmp_path, method) -> None:
    keys = ("adapter.type=lora", "adapter.rank=3", f"adapter.init={method}", "optimizer.lr=0.0", "train.train_iters=4")
    _, reader = train(host, base, tmp_path / "run", 1, *keys)
    weight = open_checkpoint(base, host).read(f"model.{FC2}.weight")
    left, right = decomposed(weight, 3, 32.0 / 3, method)
    torch.testing.assert_close(reader.read(f"model.{FC2}.adapter.lora_B"), left)
    torch.testing.assert_close(reader.read(f"model.{FC2}.adapter.initial_A"), right)
    if method == "pissa":  # the largest singular values of the weight, with the scale
        values = torch.linalg.svdvals(weight)
        torch.testing.assert_close(torch.linalg.svdvals(32.0 / 3 * left @ right)[:3], values[:3])
    merged = MergedCheckpoint(reader, host)
    torch.testing.assert_close(merged.read(f"model.{FC2}.weight"), weight, atol=1e-6, rtol=0)


def test_the_magnitudes_of_dora_are_the_norms_of_the_base(host, base, tmp_path) -> None:
    _, reader = train(host, base, tmp_path / "run", 1, "adapter.type=dora", "optimizer.lr=0.0", "train.train_iters=4")
    weight = open_checkpoint(base, host).read(f"model.{FC2}.weight")
    torch.testing.assert_close(reader.read(f"model.{FC2}.adapter.magnitude"), weight.norm(dim=1))


def test_training_starts_from_a_peft_folder(host, base, tmp_path) -> None:
    """The folder says what the adapter is."""
    model, config = adapted(host, open_checkpoint(base, host), {"type": "lora", "rank": 5, "targets": ["down_proj"]})
    folder = write_peft(tmp_path / "adapter", model, config, host)
    _, reader = train(
        host, base, tmp_path / "run", 1, f"adapter.load={folder}", "optimizer.lr=0.0", "train.train_iters=4"
    )
    found = dict(model.named_parameters())[f"{FC2}.adapter.lora_A"]
    assert torch.equal(reader.read(f"model.{FC2}.adapter.lora_A"), found)
    assert reader.metadata["config"]["adapter"]["rank"] == 5


def test_a_resumed_run_goes_on_bit_for_bit(host, base, tmp_path) -> None:
    keys = ("adapter.type=lora", "adapter.rank=3", "adapter.init=pissa", "adapter.dropout=0.2", "train.train_iters=4")
    _, whole = train(host, base, tmp_path / "whole", 4, *keys)
    train(host, base, tmp_path / "cut", 2, *keys)
    _, cut = train(host, base, tmp_path / "cut", 4, *keys)
    names = [name for name in whole.shapes() if not name.startswith("rng.")]
    assert set(names) <= set(cut.shapes())
    assert all(torch.equal(whole.read(name), cut.read(name)) for name in names)
    assert not any(name.startswith("optimizer.") and ".adapter." not in name for name in names)

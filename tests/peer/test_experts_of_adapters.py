"""Adapters of experts in folders that PEFT loads where each expert is a module of its own, as in transformers 4, and in
shared-outer folders, which tinker-cookbook merges."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ckpt.family_cases import CASES
from tests.peer.environment import installed_alone, python_beside_this
from tests.peer.test_peft_computes import COMPUTE, base_folder, found_by_peft
from tests.tune.adapters.models import adapted, loaded, write_peft

from mt_core.checkpoint_lookup import open_checkpoint
from mt_tune.adapters.on_base import AdaptedCheckpoint

SINGLE = {"experts": "per_expert"}
PROJECTIONS, DOWN = ".*(q_proj|gate_proj|up_proj|down_proj)", ".*down_proj"
EACH: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any]]]] = {
    "lora": ({"type": "lora", "rank": 4, **SINGLE}, ("LoraConfig", {"r": 4, "target_modules": PROJECTIONS})),
    "dora": (
        {"type": "dora", "rank": 4, **SINGLE},
        ("LoraConfig", {"r": 4, "use_dora": True, "target_modules": PROJECTIONS}),
    ),
    "vera": ({"type": "vera", "rank": 8, **SINGLE}, ("VeraConfig", {"r": 8, "target_modules": PROJECTIONS})),
    "ia3": ({"type": "ia3", **SINGLE}, ("IA3Config", {"target_modules": PROJECTIONS, "feedforward_modules": DOWN})),
}
TOKENS = torch.arange(1, 25).view(2, 12)


def python_with_modules_of_experts() -> Path:
    given = os.environ.get("MT_PEFT_4_PYTHON")
    needs = ("transformers>=4.57,<5", "peft>=0.18,<0.19", "huggingface_hub<1", "accelerate")
    return Path(given) if given else python_beside_this(*needs)


def older_config(base: Path) -> None:
    """Keys of config.json that transformers 4 reads by other names."""
    file = base / "config.json"
    content = json.loads(file.read_text())
    content |= {"torch_dtype": "float32", "rope_theta": content.pop("rope_parameters")["rope_theta"]}
    file.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return base_folder(tmp_path_factory.mktemp("olmoe") / "base", CASES["olmoe"])


@pytest.fixture(scope="module")
def answers(host, base, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    root, jobs, ours = tmp_path_factory.mktemp("experts"), [], {}
    older = shutil.copytree(base, root / "base")
    older_config(older)
    for name, (adapter, made) in EACH.items():
        model, config = adapted(host, open_checkpoint(base, host), adapter)
        write_peft(root / name, model, config, host)
        with torch.no_grad():
            ours[name] = model.eval()(TOKENS)
        job = {"base": str(older), "tokens": TOKENS.tolist()}
        jobs.append({**job, "adapter": str(root / name), "out": str(root / f"{name}-ours")})
        jobs.append(
            {**job, "adapter": str(root / f"{name}-made"), "out": str(root / f"{name}-made.out"), "create": made}
        )
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([python_with_modules_of_experts(), COMPUTE, root / "jobs.json"], check=True, env=environment)
    return root, ours


@pytest.mark.parametrize("name", EACH)
def test_peft_computes_our_logits_and_we_compute_its(answers, host, base, name) -> None:
    root, ours = answers
    theirs = found_by_peft(root / f"{name}-ours")
    assert (theirs["logits"] - ours[name]).abs().max() < 2e-6
    assert (theirs["merged"] - ours[name]).abs().max() < 5e-6
    reader = AdaptedCheckpoint(open_checkpoint(base, host), root / f"{name}-made", host)
    with torch.no_grad():
        found = loaded(host, reader).eval()(TOKENS)
    assert (found - found_by_peft(root / f"{name}-made.out")["logits"]).abs().max() < 2e-6


def merging_of_tinker(monkeypatch) -> Any:
    """tinker_cookbook.weights._merge; the packages above it import the client of a service."""
    root = installed_alone("tinker-cookbook==0.6.1")
    for name in ("tinker_cookbook", "tinker_cookbook.weights"):
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, package)
    return importlib.import_module("tinker_cookbook.weights._merge")


def test_tinker_merges_a_shared_outer_adapter_as_we_compute_it(host, base, tmp_path, monkeypatch) -> None:
    model, config = adapted(host, open_checkpoint(base, host), {"type": "lora", "rank": 4, "experts": "shared_outer"})
    folder, peer = write_peft(tmp_path / "adapter", model, config, host), merging_of_tinker(monkeypatch)
    weights, merged = load_file(base / "model.safetensors"), shutil.copytree(base, tmp_path / "merged")
    profile = peer.detect_merge_profile(json.loads((base / "config.json").read_text()), set(weights))
    content = json.loads((folder / "adapter_config.json").read_text())
    operations = peer.plan_merge_ops(load_file(folder / "adapter_model.safetensors"), content, set(weights), profile)
    for operation in (one for of_weight in operations.values() for one in of_weight):
        peer.apply_merge_op(weights, operation)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        found = loaded(host, open_checkpoint(merged, host)).eval()(TOKENS)
        assert (found - model.eval()(TOKENS)).abs().max() < 2e-6

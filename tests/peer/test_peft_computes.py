"""The real PEFT computes our logits and gradients from what we write, and we compute its logits from what it writes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from tests.ckpt.family_cases import CASES
from tests.peer.environment import python_beside_this
from tests.tune.adapters.models import adapted, loaded, write_peft

from mt_core.checkpoint_lookup import open_checkpoint
from mt_tune.adapters.base import adapters
from mt_tune.adapters.on_base import AdaptedCheckpoint
from mt_tune.adapters.peft_folder import stored_names

COMPUTE = Path(__file__).parent / "peft_process" / "compute.py"
PREFIX = "grad.base_model.model."
LORA = {"type": "lora", "rank": 4, "alpha": 8.0}
WITH_ROUTERS = {**LORA, "targets": ["all-linear", "router"]}
ALL_LINEAR = ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
HEADS = {**LORA, "targets": ["q_proj", "embed_tokens", "lm_head"]}
Made = tuple[str, dict[str, Any]]
EACH: dict[str, tuple[str, Mapping[str, Any], Made]] = {
    **{name: (name, LORA, ALL_LINEAR) for name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox")},
    **{name: (name, LORA, ALL_LINEAR) for name in ("bamba", "granitemoehybrid")},
    **{name: (name, WITH_ROUTERS, ALL_LINEAR) for name in ("mixtral", "qwen3_moe", "glm4_moe", "olmoe", "gpt_oss")},
    **{name: (name, WITH_ROUTERS, ALL_LINEAR) for name in ("deepseek_v2", "deepseek_v3")},
    "granitemoe": ("granitemoe", LORA, ("LoraConfig", {"r": 4, "target_parameters": ["experts.gate_up_proj"]})),
    "one by one": ("mixtral", {**LORA, "experts": "per_expert"}, ALL_LINEAR),
    "rslora of experts": ("qwen3_moe", {**LORA, "rslora": True}, ("LoraConfig", {**ALL_LINEAR[1], "use_rslora": True})),
    "dora": (
        "llama",
        {**LORA, "type": "dora"},
        ("LoraConfig", {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    ),
    "rslora, patterns": (
        "llama",
        {**LORA, "rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.gate_proj": 3.0}},
        (
            "LoraConfig",
            {"r": 4, "use_rslora": True, "rank_pattern": {"k_proj": 2}, "target_modules": ["k_proj", "v_proj"]},
        ),
    ),
    "vera": ("llama", {"type": "vera", "rank": 8}, ("VeraConfig", {"r": 8, "target_modules": ["q_proj", "down_proj"]})),
    "ia3": (
        "llama",
        {"type": "ia3", "targets": ["q_proj", "v_proj", "down_proj"]},
        ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ),
    "head": ("llama", HEADS, ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "lm_head"]})),
    "tied head": ("qwen2 tied", HEADS, ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "lm_head"]})),
    "tokens": (
        "qwen2 tied",
        {"type": "trainable_tokens", "trainable_token_indices": [3, 50]},
        ("TrainableTokensConfig", {"token_indices": [3, 50], "target_modules": ["embed_tokens"]}),
    ),
    "tokens beside": (
        "qwen2 tied",
        {**LORA, "targets": ["q_proj"], "trainable_token_indices": [3, 50]},
        ("LoraConfig", {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [3, 50]}),
    ),
}


def peft_python() -> Path:
    given = os.environ.get("MT_PEFT_PYTHON")
    if given:
        return Path(given)
    return python_beside_this("peft>=0.21,<0.22", "accelerate")


def base_folder(folder: Path, case: Any) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**case.keys)
    getattr(transformers, case.model)(config).save_pretrained(folder)
    return folder


def outcome_of_ours(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of the mean loss by the names of PEFT."""
    logits = model.eval()(tokens)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found = adapters(model)
    names, gradients = stored_names(found.values()), {}
    for adapter in found.values():
        values = {n: adapter.layouts[n].to_canonical(p.grad) for n, p in adapter.named_parameters()}
        gradients |= {PREFIX + name: value for name, value in adapter.exported(values, names)}
    return logits.detach(), gradients


@pytest.fixture(scope="module")
def answers(host, tmp_path_factory) -> dict[str, Any]:
    """Name -> (logits and gradients of ours, what PEFT computed of it, the base, PEFT's folder, what it computed)."""
    root, jobs, ours = tmp_path_factory.mktemp("peft"), [], {}
    tokens = torch.randint(1, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    for name, (family, adapter, made) in EACH.items():
        folder = root / name.replace(" ", "-")
        base = base_folder(folder / "base", CASES[family])
        model, config = adapted(host, open_checkpoint(base, host), adapter)
        write_peft(folder / "ours", model, config, host)
        ours[name] = outcome_of_ours(model, tokens)
        job = {"base": str(base), "tokens": tokens.tolist(), "merge": "tied" not in name}
        jobs.append({**job, "adapter": str(folder / "ours"), "out": str(folder / "out-ours")})
        jobs.append({**job, "adapter": str(folder / "theirs"), "out": str(folder / "out-theirs"), "create": made})
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([peft_python(), COMPUTE, root / "jobs.json"], check=True, env=environment)
    return {"root": root, "tokens": tokens, "ours": ours}


def found_by_peft(file: Path) -> dict[str, torch.Tensor]:
    error = file.with_name(file.name + ".error")
    assert not error.exists(), error.read_text()
    return load_file(file)


@pytest.mark.parametrize("name", EACH)
def test_peft_computes_our_logits_and_gradients(answers, name) -> None:
    logits, gradients = answers["ours"][name]
    theirs = found_by_peft(answers["root"] / name.replace(" ", "-") / "out-ours")
    assert (theirs["logits"] - logits).abs().max() < 2e-6
    if "merged" in theirs:
        assert (theirs["merged"] - logits).abs().max() < 5e-6
    of_peft = {
        key.replace("vector.weight", "vector"): value for key, value in theirs.items() if key.startswith("grad.")
    }
    if name == "one by one":  # PEFT has fused the adapters of experts
        of_peft, gradients = (
            {k: v for k, v in named.items() if ".experts." not in k} for named in (of_peft, gradients)
        )
    assert of_peft.keys() == gradients.keys()
    for key, value in gradients.items():
        assert (of_peft[key] - value).abs().max() < 2e-5 * value.abs().max().clamp(min=1e-6), key


@pytest.mark.parametrize("name", EACH)
def test_we_compute_the_logits_of_peft(answers, host, name) -> None:
    folder = answers["root"] / name.replace(" ", "-")
    theirs = found_by_peft(folder / "out-theirs")
    reader = AdaptedCheckpoint(open_checkpoint(folder / "base", host), folder / "theirs", host)
    with torch.no_grad():
        assert (loaded(host, reader).eval()(answers["tokens"]) - theirs["logits"]).abs().max() < 2e-6

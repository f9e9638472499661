"""What is written for a version of Megatron-Core has the names and shapes that its own models declare, and no other.

`declared_names.json` was made by tests/peer/megatron_process/declared_names.py from megatron-core 0.8.0 to 0.19.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.megatron.conftest import RandomCheckpoint, assert_same_tensors
from tests.ckpt.megatron.test_optimizer import megatrons_buffer
from tests.ckpt.megatron.test_round_trip import through
from tests.covering import covering

from mt_ckpt.megatron.rank_files import namespace_attributes
from mt_ckpt.megatron.rank_plan import in_order
from mt_ckpt.megatron.save import part_entries, wanted_shapes
from mt_ckpt.megatron.target import Plan, make_plan
from mt_ckpt.megatron.versions import HEAD, NEWEST, OLDEST, conventions, parse_version
from mt_ckpt.megatron_dist.dist_plan import dist_plan
from mt_ckpt.megatron_dist.flat_plan import FULLY_RESHARDABLE
from mt_ckpt.megatron_dist.index import read_common, read_index
from mt_ckpt.pickles.torch_file import open_torch_file
from mt_core import checkpoint_lookup
from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "vocab_size": 101}
LLAMA = {**SHAPE, "family": "llama", "num_query_groups": 2}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
LATENT = {
    **SHAPE,
    "family": "deepseek",
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
MIXER = {"mamba_head_dim": 8, "mamba_state_dim": 6, "mamba_num_groups": 4}
HYBRID = {**SHAPE, **MIXER, "family": "hybrid"}
del HYBRID["num_layers"]
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {**SHAPE, "family": "gpt", "max_position_embeddings": 16},
    "llama": LLAMA,
    "qwen3": {**LLAMA, "family": "qwen"},
    "mixtral": {**LLAMA, "family": "mixtral", "moe": EXPERTS},
    "grouped": {**LLAMA, "family": "mixtral", "moe": EXPERTS},
    "mixed": {
        **LLAMA,
        "family": "qwen_moe",
        "qk_layernorm": False,
        "moe": {**EXPERTS, "moe_layer_freq": "([0]*1+[1]*1)", "moe_shared_expert_intermediate_size": 16},
    },
    "latent": LATENT,
    "prediction": {**LATENT, "mtp_num_layers": 1},
    "mamba": {"family": "mamba", "num_layers": 2, "hidden_size": 256, "vocab_size": 101},
    "hybrid": {**HYBRID, "hybrid_layer_pattern": "M*M-"},
    "hybrid_experts": {**HYBRID, "hybrid_layer_pattern": "M*E", "moe": EXPERTS},
    "bert": {**SHAPE, "family": "bert", "max_position_embeddings": 16},
    "t5": {
        **SHAPE,
        "family": "t5",
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": 16,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "activation": "gelu",
        "add_bias_linear": True,
        "scale_attention_scores": True,
        "scale_output": False,
        "add_output_bias": True,
    },
}
"""As the models that the names were taken from, the vocabulary padded to 128."""
DECLARED: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(
    (Path(__file__).parent / "declared_names.json").read_text()
)
"""Model -> implementation -> for each kind of names, `versions` that have them, `torch`, `torch_dist`, `parameters`."""


def cases() -> Iterator[Any]:
    """The first and the last version of each kind of names."""
    for model, by_implementation in DECLARED.items():
        for implementation, kinds in by_implementation.items():
            for kind in kinds:
                for version in dict.fromkeys([kind["versions"][0], kind["versions"][-1]]):
                    yield pytest.param(model, implementation, version, kind, id=f"{model}-{implementation}-{version}")


@cache
def source_of(model: str, host: PluginHost) -> RandomCheckpoint:
    source = RandomCheckpoint(MODELS[model], host)
    if model == "grouped":
        source.metadata["megatron"] = {"args": {"moe_grouped_gemm": True}}
    return source


def planned(model: str, implementation: Any, version: str, ckpt_format: str, host: PluginHost) -> Plan:
    options = ConvertOptions(target_megatron_version=version, target_transformer_impl=implementation)
    return make_plan(source_of(model, host), options, host, ckpt_format)


@pytest.mark.parametrize(("model", "implementation", "version", "declared"), list(cases()))
def test_ranks_hold_what_the_models_of_a_version_declare(model, implementation, version, declared, host) -> None:
    made = planned(model, implementation, version, "torch", host)
    wanted = wanted_shapes(made, 0, 0, made.target.grid.context({"tp": 0, "ep": 0, "etp": 0}))
    found = {name: shape and list(shape) for name, shape in wanted.items()}
    assert found == without_attention(declared["torch"])


@pytest.mark.parametrize(("model", "implementation", "version", "declared"), list(cases()))
def test_the_index_has_what_the_models_of_a_version_declare(model, implementation, version, declared, host) -> None:
    made = dist_plan(planned(model, implementation, version, "torch_dist", host), FULLY_RESHARDABLE)
    found: dict[str, Any] = {key: list(tensor.shape) for key, tensor in made.tensors.items()}
    assert found | made.objects == declared["torch_dist"]


@pytest.mark.parametrize(("model", "implementation", "version", "declared"), list(cases()))
def test_parameters_are_in_the_order_of_the_models(model, implementation, version, declared, host) -> None:
    """By which an optimizer numbers them, and lays them out in its buffers."""
    made = planned(model, implementation, version, "torch", host)
    in_model = [name.replace("lm_head.output_layer.", "output_layer.") for name in declared["parameters"]]
    assert [entry.stored for entry in part_entries(made, 0, 0)] == in_model


def without_attention(names: Mapping[str, Any]) -> dict[str, Any]:
    """Transformer Engine's attention has an FP8 state that a strict load does not ask for."""
    return {name: shape for name, shape in names.items() if not name.endswith("core_attention._extra_state")}


# -- versions ----------------------------------------------------------------------------------------


def test_what_a_version_can_be_called() -> None:
    assert parse_version("0.12") == parse_version("0.12.2") == parse_version("0.12.0rc3") == (0, 12)
    assert parse_version(None) == parse_version(HEAD) == parse_version("head") == NEWEST
    assert parse_version("0.8") == OLDEST
    assert conventions(NEWEST).convolution != conventions((0, 18)).convolution


@pytest.mark.parametrize("text", ["0.7", "0.20", "1.0", "newest", "0", "", "0.12.2.1"])
def test_a_version_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--target-megatron-version {text}: .* 0\.8 to 0\.19 are known.* HEAD"):
        parse_version(text)


@pytest.mark.parametrize(
    ("model", "version", "words"),
    [
        ("latent", "0.9", "needs multi_latent_attention=True, which Megatron-Core has since 0.10"),
        ("prediction", "0.11", "needs mtp_num_layers=1, which Megatron-Core has since 0.12"),
        (
            "mixed",
            "0.9",
            r"needs moe_\w+=.*, which Megatron-Core has since 0\.10",
        ),
        ("mixtral", "0.9", "needs moe_ffn_hidden_size=24, which Megatron-Core has since 0.10"),
        ("hybrid", "0.11", "needs mamba_head_dim=8, which Megatron-Core has since 0.12"),
        ("hybrid_experts", "0.15", "needs hybrid_override_pattern 'E', which Megatron-Core has since 0.16"),
    ],
)
def test_a_model_that_a_version_does_not_have_is_refused(model, version, words, host) -> None:
    with pytest.raises(ConfigError, match=rf"--target-megatron-version {version}: the model {words}"):
        planned(model, None, version, "torch", host)


def test_hybrid_arguments_of_a_version(host) -> None:
    older, newer = (planned("hybrid", None, version, "torch", host).args for version in ("0.16", "0.19"))
    assert (older["hybrid_override_pattern"], older["hybrid_layer_pattern"]) == ("M*M-", None)
    assert (newer["hybrid_override_pattern"], newer["hybrid_layer_pattern"]) == (None, "M*M-")
    assert older["spec"] == ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    assert newer["spec"] == ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]


def test_rotary_models_say_what_a_run_says_unless_it_said_otherwise(host) -> None:
    """Megatron's argument is true of every run without --no-position-embedding, and compared on loading."""
    assert planned("llama", None, HEAD, "torch", host).args["add_position_embedding"] is True
    source = RandomCheckpoint(MODELS["llama"], host)
    source.metadata["megatron"] = {"args": {"add_position_embedding": False}}
    assert make_plan(source, ConvertOptions(), host, "torch").args["add_position_embedding"] is False


# -- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["megatron", "megatron-dist"])
@pytest.mark.parametrize(
    ("model", "version"),
    [
        ("hybrid", "0.13"),
        ("hybrid", "0.19"),
        ("prediction", "0.12"),
        ("prediction", "0.19"),
        ("t5", "0.8"),
        ("t5", "0.19"),
    ],
)
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_what_is_written_for_a_version_is_read(saver, model, version, implementation, tmp_path, host) -> None:
    source = source_of(model, host)
    options = ConvertOptions(target_megatron_version=version, target_transformer_impl=implementation)
    host[CHECKPOINT_SAVERS].get(saver).convert.load()(tmp_path, source, options, host)
    assert_same_tensors(checkpoint_lookup.open_checkpoint(tmp_path, host), source)
    files = {file.name for file in tmp_path.rglob("*")}
    assert ("common.pt" in files) == (saver == "megatron-dist" and version != "0.19")


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2},
        {"target_pipeline_parallel_size": 2, "target_virtual_pipeline_parallel_size": 1},
    ],
)
@pytest.mark.parametrize("model", ["gpt", "llama", "mamba_small"])
def test_flat_buckets_of_the_optimizer_are_read_again(model, sizes, tmp_path, host) -> None:
    small = {**MODELS["mamba"], **MIXER, "hidden_size": 32}
    source = RandomCheckpoint(small if model == "mamba_small" else MODELS[model], host, optimizer=True)
    options = ConvertOptions(target_optimizer_format="dp_reshardable", **sizes)
    spec = host[CHECKPOINT_SAVERS].get("megatron-dist")
    spec.convert.load()(tmp_path, source, options, host)
    assert_same_tensors(checkpoint_lookup.open_checkpoint(tmp_path, host), source)
    # The buckets' lengths are objects, which have no shape.
    assert spec.require_strict_names.load()(tmp_path, source, options, host).number > 10


@pytest.mark.parametrize(
    ("saver", "options", "words"),
    [
        ("megatron-dist", {"target_megatron_version": "0.14"}, "--target-megatron-version 0.14: before .* 0.15 the"),
        ("megatron", {"target_optimizer_format": "dp_reshardable"}, "--target-optimizer-format dp_reshardable means"),
        ("megatron-legacy", {"target_megatron_version": "0.12"}, "means nothing to the format megatron-legacy"),
        ("hf", {"target_transformer_impl": "local"}, "--target-transformer-impl local means nothing to the format hf"),
        ("mt", {"target_megatron_version": "0.12"}, "means nothing to the format mt: it is none of Megatron-Core's"),
    ],
)
def test_options_that_a_format_cannot_express_are_refused(saver, options, words, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS["gpt"], host, optimizer=True)
    with pytest.raises(ConfigError, match=words):
        host[CHECKPOINT_SAVERS].get(saver).convert.load()(tmp_path, source, ConvertOptions(**options), host)


def test_a_mixer_of_several_ranks_before_its_sections_were_apart(host) -> None:
    """Written as one matrix by 0.8, in an order that depends on the ranks."""
    options = ConvertOptions(target_megatron_version="0.8", target_tensor_parallel_size=2)
    made = make_plan(source_of("mamba", host), options, host, "torch_dist")
    with pytest.raises(ConfigError, match=r"--target-megatron-version 0\.8: .* --target-tensor-parallel-size 1 only"):
        dist_plan(made, FULLY_RESHARDABLE)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_is_that_of_the_run(distributed: bool, dtype: torch.dtype, tmp_path, host) -> None:
    """Distributed or not, as the source's run had it, and with master weights where the weights are 16-bit."""
    source = RandomCheckpoint(MODELS["mixtral"], host, dtype=dtype, optimizer=True)
    source.metadata["config"]["parallel"] = {"use_distributed_optimizer": distributed}
    options = ConvertOptions(target_expert_parallel_size=2)
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path, source, options, host)
    assert_same_tensors(checkpoint_lookup.open_checkpoint(tmp_path, host), source)
    index = read_index(tmp_path / "iter_0000007")
    common = read_common(index)
    assert namespace_attributes(common, tmp_path)["use_distributed_optimizer"] == distributed
    assert ("distrib_optim_sharding_type" in common["content_metadata"]) == distributed
    states = {key.split(".")[2] for key in index.tensors if key.startswith("optimizer.state.")}
    copies = {"param"} if distributed else {"fp32_param"} if dtype == torch.bfloat16 else set()
    assert states == {"exp_avg", "exp_avg_sq", *copies}


EXPERT_RANKS = {
    "one rank": {},
    "tensor": {"target_tensor_parallel_size": 2},
    "tensor, experts whole": {"target_tensor_parallel_size": 2, "target_expert_tensor_parallel_size": 1},
    "experts": {"target_expert_parallel_size": 2, "target_pipeline_parallel_size": 2},
    "all": {
        "target_tensor_parallel_size": 2,
        "target_expert_parallel_size": 2,
        "target_expert_tensor_parallel_size": 2,
        "target_pipeline_parallel_size": 2,
    },
}


@pytest.mark.parametrize("model", ["mixtral", "mixed"])
@pytest.mark.parametrize(("ranks", "implementation"), covering(list(EXPERT_RANKS), ["local", "transformer_engine"]))
def test_flat_buckets_of_experts_are_read_again(model, ranks, implementation, tmp_path, host) -> None:
    """With expert parallel ranks the experts have an optimizer for themselves; the first stage of "mixed" has none."""
    source = RandomCheckpoint(MODELS[model], host, optimizer=True)
    options = ConvertOptions(
        target_optimizer_format="dp_reshardable", target_transformer_impl=implementation, **EXPERT_RANKS[ranks]
    )
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path, source, options, host)
    read = checkpoint_lookup.open_checkpoint(tmp_path, host)
    assert "optimizer_left_out" not in read.metadata["megatron"]
    assert_same_tensors(read, source)
    chained = {key.partition("optimizer.")[0] for key in read_index(read.folder).tensors if "bucket_idx" in key}
    assert chained == ({"chained_0.", "chained_1."} if "target_expert_parallel_size" in EXPERT_RANKS[ranks] else {""})


def test_an_expert_rank_has_its_experts_one_by_one(tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS["mixtral"], host, optimizer=True)
    options = ConvertOptions(target_optimizer_format="dp_reshardable", target_expert_parallel_size=2)
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path, source, options, host)
    stored = read_index(tmp_path / "iter_0000007").tensors
    for rank in (0, 1):
        own = {
            (layer, expert, matrix): source.read(
                f"optimizer.exp_avg.decoder.layers.{layer}.mlp.experts.linear_{matrix}.weight"
            )[expert]
            for layer in (0, 1)
            for expert in (2 * rank, 2 * rank + 1)
            for matrix in ("fc1", "fc2")
        }
        (key,) = (
            key for key in stored if key.startswith("chained_1.") and f"idx_{rank}.gbuf" in key and "avg_sq" in key
        )
        found = stored[key.replace("exp_avg_sq", "exp_avg")].read()
        torch.testing.assert_close(found, megatrons_buffer(own, bucket_size=None, data_parallel=1), rtol=0, atol=0)


def test_an_optimizer_is_left_out_where_that_is_requested(tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS["gpt"], host, optimizer=True)
    options = ConvertOptions(target_optimizer_format="none", target_megatron_version="0.12")
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path, source, options, host)
    expected = RandomCheckpoint(MODELS["gpt"], host, optimizer=True)
    for name in [name for name in expected.tensors if name.startswith("optimizer.")]:
        del expected.tensors[name]
    assert_same_tensors(checkpoint_lookup.open_checkpoint(tmp_path, host), expected)


def test_numbers_of_parameters_in_an_optimizer_follow_the_version(host) -> None:
    """A mixer's convolution became parameters of the mixer itself, which come before its layers."""
    styles = [planned("hybrid", None, version, "torch", host).torch_style() for version in ("0.18", "0.19")]
    names = [name for name in styles[0].parameters if name.startswith("decoder.layers.0.mixer.")]
    older, newer = ([n.removeprefix("decoder.layers.0.mixer.") for n in in_order(names, style)] for style in styles)
    assert older.index("conv1d.weight") > older.index("in_proj.weight")
    assert newer[:2] == ["conv1d.weight", "conv1d.bias"]


def test_the_options_of_the_command(tmp_path, host) -> None:
    """A version that is not known ends in a sentence; one that is known says what the arguments inside are."""
    import typer
    from typer.testing import CliRunner

    from mt_ckpt.commands.convert import convert

    app = typer.Typer()
    app.command()(convert)
    through("mt", RandomCheckpoint(MODELS["llama"], host), ConvertOptions(), tmp_path / "mt", host)
    paths = ["--load-dir", str(tmp_path / "mt"), "--save-dir", str(tmp_path / "out"), "--saver", "megatron-dist"]
    refused = CliRunner().invoke(app, [*paths, "--target-megatron-version", "0.7"])
    assert "0.8 to 0.19 are known" in str(refused.exception)
    wrong = CliRunner().invoke(app, [*paths, "--target-transformer-impl", "apex"])
    assert wrong.exit_code == 2
    done = CliRunner().invoke(app, [*paths, "--target-megatron-version", "0.16", "--target-transformer-impl", "local"])
    assert done.exit_code == 0, done.output
    (common,) = (tmp_path / "out").rglob("common.pt")
    args = open_torch_file(common).value["args"].attributes
    assert args["transformer_impl"] == "local"

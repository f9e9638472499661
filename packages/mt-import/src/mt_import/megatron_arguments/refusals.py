"""What a run of Megatron's requests and cannot be done here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mt_core import specs
from mt_core.plugins import PluginHost
from mt_core.specs import TOKENIZERS
from mt_import.megatron_arguments import multimodal
from mt_import.megatron_arguments.command_line import ParsedArgument
from mt_import.megatron_arguments.entry_scripts import EntryScript
from mt_import.megatron_arguments.table import Version, by_dest

OPTIMIZERS: Mapping[str, str] = {"adam": "adam", "sgd": "sgd", "lion": "lion", "muon": "muon", "dist_muon": "muon"}
"""Megatron's name -> ours."""
COMMUNICATORS: Mapping[str, str] = {
    **{name: name for name in ("tp", "cp", "dp", "pp", "ep")},
    **dict.fromkeys(("dp_cp", "intra_dp_cp"), "shard"),
    **dict.fromkeys(("ep_dp", "intra_ep_dp"), "expert_shard"),
    "inter_ep_dp": "expert_replicate",
    "mp": "model",
}
"""Megatron's name of a group -> our axis with its messages."""
OFFLOADED = ("attn_norm", "attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear")
RECOMPUTED = ("core_attn", "layernorm", "mhc", "mlp", "mla_up_proj", "moe", "moe_act", "shared_experts")
FP8_RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")
MOMENTS = ("fp32", "bf16")
CAUGHT_SIGNALS = ("SIGTERM", "SIGINT")
MODEL_SIZE = ("num_layers", "hidden_size", "num_attention_heads")
"""Arguments of a run that says itself which model it trains."""
MEGATRON_SPECS = ("megatron.core.models.", "megatron.core.post_training.", "megatron.core.ssm.")
"""Modules with the layers that Megatron itself has for a model, in one implementation or another."""
NOT_IN_LEGACY_MODELS = (
    *("num_experts", "qk_layernorm", "multi_latent_attention", "mtp_num_layers", "spec", "window_size"),
    *("rotary_base", "rotary_interleaved", "use_rope_scaling"),
)
"""Arguments that Megatron's models from before Megatron-Core ignore, or do in another way."""
ENCODER_STAGES = "pipeline stages for the encoder alone"
OF_ONE_ENTRY: Mapping[str, tuple[str, str]] = {
    "use_legacy_models": ("gpt", "Megatron's models from before Megatron-Core; those of GPT alone are translated"),
    "encoder_pipeline_model_parallel_size": ("t5", ENCODER_STAGES),
}
"""Argument -> the entry whose runs are translated, and what it requests of those of others."""


@dataclass(frozen=True)
class Refusal:
    """An argument that is left out, and why."""

    parsed: ParsedArgument
    reason: str


def find_refusals(
    parsed_arguments: Mapping[str, ParsedArgument], entry: EntryScript, version: Version, host: PluginHost
) -> dict[str, Refusal]:
    """Attribute -> why it cannot be done, of those that were given."""
    refusals = {}
    for dest, parsed in parsed_arguments.items():
        reason = _reason(parsed, parsed_arguments, entry, version, host)
        if reason is not None:
            refusals[dest] = Refusal(parsed, reason)
    return refusals


def _reason(
    parsed: ParsedArgument,
    parsed_arguments: Mapping[str, ParsedArgument],
    entry: EntryScript,
    version: Version,
    host: PluginHost,
) -> str | None:
    # An option that is given its default requests nothing.
    if parsed.value is None or parsed.value == parsed.argument.default_of(version):
        return None
    if parsed.argument.outcome == "refused":
        return parsed.argument.reason
    name, request = OF_ONE_ENTRY.get(parsed.argument.dest, (entry.name, ""))
    if entry.name != name:
        return request
    if check := _CHECKS.get(parsed.argument.dest):
        # The first objection.
        return next(check(parsed.value, {dest: other.value for dest, other in parsed_arguments.items()}, host), None)
    return None


Check = Callable[[Any, Mapping[str, Any], PluginHost], Iterator[str]]


def _optimizer(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value not in OPTIMIZERS:
        yield f"this optimizer; optimizer.optimizer can be {', '.join(host[specs.OPTIMIZERS].names())}"


def _tokenizer(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value == multimodal.TOKENIZER and values.get("language_model_type"):
        return
    if value not in host[TOKENIZERS].names():
        yield f"this tokenizer; tokenizer.tokenizer_type can be {', '.join(host[TOKENIZERS].names())}"


def _modules(value: list[str], values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if unknown := [module for module in value if module not in RECOMPUTED]:
        yield f"recomputation of {', '.join(unknown)}; recompute.recompute_modules can have {', '.join(RECOMPUTED)}"


def _offloaded(value: list[str], values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if unknown := [module for module in value if module not in OFFLOADED]:
        known = ", ".join(OFFLOADED)
        yield f"activations of {', '.join(unknown)} in host memory; recompute.offload_modules can have {known}"


def _fp8_recipe(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value not in FP8_RECIPES and values.get("fp8"):
        yield f"this recipe; precision.fp8_recipe can be {', '.join(FP8_RECIPES)}, or rowwise"


def _fp4_recipe(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value != "nvfp4" and values.get("fp4"):
        yield "this recipe; precision.fp8_recipe can be nvfp4 with precision.fp8_format=e2m1"


def _loader(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value != "single" and not (value == "external" and values.get("language_model_type")):
        yield "a loader that orders samples by itself; the order follows from train.seed and the samples consumed"


def _moments(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if not values.get("use_precision_aware_optimizer"):
        return
    if value not in MOMENTS:
        yield f"moments in {value}; optimizer.exp_avg_dtype can be {' or '.join(MOMENTS)}"
    elif values.get("exp_avg_dtype", "fp32") != values.get("exp_avg_sq_dtype", "fp32"):
        yield "moments of two dtypes; optimizer.exp_avg_dtype is that of both"


def _balancing(value: list[str], values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if "quantile_balancing" in value:
        yield "quantile balancing of experts"


def _cp_comm(value: list[str], values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if len(set(value)) > 1:
        yield "another way to exchange keys in each layer; parallel.cp_comm_type is that of all"


def _flex_backend(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value not in ("deepep", "hybridep") and values.get("moe_token_dispatcher_type") == "flex":
        yield "this backend; the dispatcher flex has deepep and hybridep"


def _random_streams(value: bool, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if values.get("load") and not (values.get("finetune") or values.get("no_load_optim")):
        yield "random streams that start anew when a run is resumed with its optimizer"


def _stream_groups(value: list[str], values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if unknown := [group for group in value if group not in COMMUNICATORS]:
        known = ", ".join(COMMUNICATORS)
        yield f"communicators of {', '.join(unknown)}; parallel.nccl_communicators has axes for {known}"


def _exit_signal(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value not in CAUGHT_SIGNALS:
        yield f"a run that saves and ends after {value}; {' and '.join(CAUGHT_SIGNALS)} do"


def _muon_blocks(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    muon = OPTIMIZERS.get(values.get("optimizer", "")) == "muon"
    if value == "blockwise" and muon and values.get("tensor_model_parallel_size", 1) > 1:
        yield "each tensor-parallel rank's part of a weight orthogonalized by itself; weights are orthogonalized whole"


def _chat_template(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if values.get("sft"):
        yield "conversations in another form; tokenizer.chat_template takes a template"


def _fim_token(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if values.get("fim_data"):
        yield "another token in samples with a hole; the tokenizer's end of document and padding are used"


def _whitespaces(value: bool, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if values.get("sft"):
        yield "another tokenization of texts that are tokenized while training"


def _main_params(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if values.get("use_megatron_fsdp") and value not in ("fp32", "auto"):
        yield f"weights kept in {value} alone; they are kept in fp32"


def _main_grads(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if values.get("use_megatron_fsdp") and value not in ("fp32", "auto"):
        yield f"gradients accumulated in {value}; precision.accumulate_allreduce_grads_in_fp32 says their dtype"


def _grad_comm(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if values.get("use_megatron_fsdp") and value not in ("fp32", "auto") and not values.get("grad_reduce_in_bf16"):
        yield f"gradients reduced in {value}; precision.grad_reduce_in_bf16 reduces them in bf16"


def _checkpoint_arguments(value: bool, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if not all(values.get(dest) for dest in MODEL_SIZE):
        yield "arguments of a checkpoint; mt import CHECKPOINT translates them, and checkpoint.load takes its model"


def _spec(value: list[str], values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value != ["local"] and not (value and value[0].startswith(MEGATRON_SPECS)):
        yield "layers of a Python module of your own; write a plugin, see docs/guides/add-a-model.md"


def _legacy_models(value: bool, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    known = {dest: by_dest()[dest] for dest in NOT_IN_LEGACY_MODELS}
    unlike = [known[dest].spelled for dest in known if values.get(dest, known[dest].default) != known[dest].default]
    if unlike:
        yield f"Megatron's models from before Megatron-Core, which do not have {', '.join(unlike)} or do it otherwise"


def _encoder_stages(value: int, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    """Stages are divided over encoder and decoder together: their sizes agree where each has as many layers."""
    encoder = values.get("encoder_num_layers") or values.get("num_layers") or 0
    decoder = values.get("decoder_num_layers") or encoder
    if encoder * values.get("pipeline_model_parallel_size", 1) != decoder * value:
        yield f"{ENCODER_STAGES}, with another number of layers than the decoder's have"


def _outer_of_experts(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    outer = values.get("outer_dp_sharding_strategy", "no_shard")
    if value != outer:
        yield f"the state of experts sharded as {value} and the others' as {outer}; both are sharded alike"


def _outer(value: str, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    fsdp = values.get("use_megatron_fsdp") or values.get("use_megatron_fsdp_v2")
    strategy = values.get("data_parallel_sharding_strategy", "optim_grads_params")
    if value != "no_shard" and not (fsdp and strategy.startswith("optim_grads")):
        yield "a second sharding over groups of data-parallel ranks without FSDP, which has it"


def _ssm_states(value: str, given: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
    if value not in ("fp32", "float32"):
        yield f"states of Mamba layers in {value}; they are in fp32"


def _of_pictures(objection: Callable[[Any], Iterator[str]]) -> Check:
    """A check of an argument of the multimodal example, which counts there alone."""

    def check(value: Any, values: Mapping[str, Any], host: PluginHost) -> Iterator[str]:
        if values.get("language_model_type"):
            yield from objection(value)

    return check


_CHECKS: Mapping[str, Check] = {
    "language_model_type": _of_pictures(multimodal.decoder_objection),
    "vision_model_type": _of_pictures(multimodal.tower_objection),
    "tokenizer_prompt_format": _of_pictures(multimodal.template_objection),
    "image_tag_type": _of_pictures(multimodal.markers_objection),
    "data_path": _of_pictures(multimodal.shards_objection),
    "use_legacy_models": _legacy_models,
    "encoder_pipeline_model_parallel_size": _encoder_stages,
    "mamba_training_ssm_states_dtype": _ssm_states,
    "outer_dp_sharding_strategy": _outer,
    "expert_outer_dp_sharding_strategy": _outer_of_experts,
    "spec": _spec,
    "use_checkpoint_args": _checkpoint_arguments,
    "exit_signal": _exit_signal,
    "muon_tp_mode": _muon_blocks,
    "chat_template": _chat_template,
    "sft_tokenizer_prompt_format": _chat_template,
    "fim_pad_token": _fim_token,
    "fim_eod_token": _fim_token,
    "tokenizer_sentencepiece_ignore_extra_whitespaces": _whitespaces,
    "megatron_fsdp_main_params_dtype": _main_params,
    "megatron_fsdp_main_grads_dtype": _main_grads,
    "megatron_fsdp_grad_comm_dtype": _grad_comm,
    "no_load_rng": _random_streams,
    "optimizer": _optimizer,
    "tokenizer_type": _tokenizer,
    "recompute_modules": _modules,
    "offload_modules": _offloaded,
    "fp8_recipe": _fp8_recipe,
    "fp4_recipe": _fp4_recipe,
    "dataloader_type": _loader,
    "exp_avg_dtype": _moments,
    "exp_avg_sq_dtype": _moments,
    "moe_router_load_balancing_type": _balancing,
    "cp_comm_type": _cp_comm,
    "high_priority_stream_groups": _stream_groups,
    "moe_flex_dispatcher_backend": _flex_backend,
}

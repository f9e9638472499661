"""Names of Accelerate that mt does not have, each with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mt_core.errors import ConfigError, MtError

LAYOUTS = "other engines share the work here: give MegatronLMPlugin (TP, PP, CP, EP, ZeRO-1, FSDP2)"
OPTIONS: Mapping[str, str] = {
    "deepspeed_plugin": LAYOUTS + "; MegatronLMPlugin(use_distributed_optimizer=True) is ZeRO-1",
    "deepspeed_plugins": LAYOUTS + "; MegatronLMPlugin(use_distributed_optimizer=True) is ZeRO-1",
    "fsdp_plugin": LAYOUTS + "; MegatronLMPlugin(use_custom_fsdp=True) is FSDP2",
    "torch_tp_plugin": LAYOUTS + "; MegatronLMPlugin(tp_degree=...)",
    "parallelism_config": LAYOUTS + "; its sizes are fields of the plugin",
    "dynamo_backend": "call torch.compile(model) before prepare; models of mt have train.compile",
    "dynamo_plugin": "call torch.compile(model) before prepare; models of mt have train.compile",
}
"""Arguments of Accelerator."""
ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(
        ("context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank", "pipeline_parallel_rank"),
        "ranks on the axes of a layout are those of model.engine.ctx, for example model.engine.ctx.dp.rank",
    ),
    "tensor_parallel_rank": "it is model.engine.ctx.tp.rank",
    "torch_device_mesh": "the axes of a layout are those of model.engine.ctx",
    "maybe_context_parallel": "MegatronLMPlugin(context_parallel_size=...) divides sequences in the model's call",
    "deepspeed_ulysses_dl_adapter": "MegatronLMPlugin(context_parallel_size=...) divides sequences",
    "lomo_backward": "LOMO updates weights in the backward pass, before gradients are summed over ranks",
    "step": "the steps of an Accelerator with the plugin are model.iteration; a program counts its own",
    "flag_tensor": "set_trigger and check_trigger are the interface; nothing else of it is kept",
    "verify_device_map": "models are on one device each; from_pretrained(device_map=...) is for generation",
}
"""Attributes of Accelerator."""


class RefusedNameError(MtError, ImportError):
    """A name that Accelerate has and mt does not; the message has the reason."""


class RefusedAttributeError(MtError, AttributeError):
    """The same of an attribute."""


def refuse_options(**options: Any) -> None:
    """Raises ConfigError for those that are not None."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"Accelerator({name}=...): {OPTIONS[name]}")


def refuse_attribute(name: str) -> Any:
    """Raises RefusedAttributeError with the reason, AttributeError for a name that Accelerate does not have."""
    if name in ATTRIBUTES:
        raise RefusedAttributeError(f"accelerator.{name}: {ATTRIBUTES[name]}")
    raise AttributeError(f"Accelerator has no attribute {name!r}")


LOADING = "models larger than a device are sharded here: mt generate and mt serve with parallel.*, or MegatronLMPlugin"
QUANTIZED = "weights in 8 and 4 bits are those of mt convert and mt serve"
FP8 = "FP8 is mixed_precision='fp8' with MegatronLMPlugin"
FSDP = "MegatronLMPlugin(use_custom_fsdp=True) is FSDP2"
DEEPSPEED = "MegatronLMPlugin(use_distributed_optimizer=True) is ZeRO-1, use_custom_fsdp=True shards weights, too"
STARTING = "processes are started by mt launch"
COMPILING = "call torch.compile(model) before prepare; models of mt have train.compile"
LOADER = "Accelerator.prepare and prepare_data_loader divide loaders over processes, by the Accelerator's configuration"
INNER = "it is of Accelerate's inside; nothing here has it"
MODULES = "modules of mt_accelerate have other names; import the name itself from mt_accelerate or mt_accelerate.utils"
NAMES: Mapping[str, str] = {
    **dict.fromkeys(("DeepSpeedPlugin", "DeepSpeedSequenceParallelConfig", "deepspeed_required"), DEEPSPEED),
    **dict.fromkeys(("GatheredParameters", "compile_regions_deepspeed", "prepare_deepspeed_cmd_env"), DEEPSPEED),
    **dict.fromkeys(("FullyShardedDataParallelPlugin", "get_fsdp2_grad_scaler", "model_has_dtensor"), FSDP),
    **dict.fromkeys(("disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading"), FSDP),
    **dict.fromkeys(("load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer"), FSDP),
    **dict.fromkeys(("merge_fsdp_weights", "compile_regions_fsdp2", "ensure_weights_retied"), FSDP),
    **dict.fromkeys(
        (f"fsdp2_{name}" for name in ("apply_ac", "canonicalize_names", "load_full_state_dict", "prepare_model")), FSDP
    ),
    "fsdp2_switch_optimizer_parameters": FSDP,
    **dict.fromkeys(("ParallelismConfig", "TorchContextParallelConfig", "TorchTensorParallelConfig"), LAYOUTS),
    **dict.fromkeys(("TorchTensorParallelPlugin", "get_model_tp_size", "prepare_pippy"), LAYOUTS),
    **dict.fromkeys(("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs", "convert_model"), FP8),
    **dict.fromkeys(("apply_fp8_autowrap", "check_cuda_fp8_capability", "contextual_fp8_autocast"), FP8),
    **dict.fromkeys(("convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "has_ao_layers"), FP8),
    **dict.fromkeys(("has_transformer_engine_layers", "torchao_required"), FP8),
    **dict.fromkeys(("BnbQuantizationConfig", "load_and_quantize_model", "has_4bit_bnb_layers"), QUANTIZED),
    **dict.fromkeys(("DynamoBackend", "TorchDynamoPlugin", "compile_regions", "has_compiled_regions"), COMPILING),
    **dict.fromkeys(("cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model"), LOADING),
    **dict.fromkeys(("infer_auto_device_map", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"), LOADING),
    **dict.fromkeys(("OffloadedWeightsLoader", "PrefixedDataset", "align_module_device", "check_device_map"), LOADING),
    **dict.fromkeys(("calculate_maximum_sizes", "compute_module_sizes", "get_balanced_memory"), LOADING),
    **dict.fromkeys(("get_max_layer_size", "get_max_memory", "has_offloaded_params", "load_offloaded_weight"), LOADING),
    **dict.fromkeys(("load_offloaded_weights", "offload_state_dict", "offload_weight", "save_offload_index"), LOADING),
    **dict.fromkeys(("set_module_tensor_to_device", "extract_submodules_state_dict", "load_state_dict"), LOADING),
    **dict.fromkeys(("check_tied_parameters_in_config", "check_tied_parameters_on_same_device"), LOADING),
    **dict.fromkeys(("find_tied_parameters", "retie_parameters", "named_module_tensors", "CustomDtype"), LOADING),
    **dict.fromkeys(("id_tensor_storage", "dtype_byte_size", "convert_file_size_to_int"), LOADING),
    **dict.fromkeys(("clean_state_dict_for_safetensors", "copy_tensor_to_devices", "SAFE_WEIGHTS_PATTERN_NAME"), INNER),
    **dict.fromkeys(("CannotPadNestedTensorWarning", "TensorInformation", "WEIGHTS_PATTERN_NAME"), INNER),
    **dict.fromkeys(("get_data_structure", "get_grad_scaler", "get_mixed_precision_context_manager"), INNER),
    **dict.fromkeys(("get_module_children_bottom_up", "get_pretty_name", "ignorant_find_batch_size"), INNER),
    **dict.fromkeys(("initialize_tensors", "is_tensor_information", "pad_input_tensors"), INNER),
    **dict.fromkeys(("convert_outputs_to_fp32", "get_current_device_type", "are_libraries_initialized"), INNER),
    **dict.fromkeys(("check_cuda_p2p_ib_support", "check_os_kernel", "get_cpu_distributed_information"), INNER),
    **dict.fromkeys(("get_gpu_info", "set_numa_affinity", "purge_accelerate_environment"), INNER),
    **dict.fromkeys(("MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION"), INNER),
    **dict.fromkeys(("TORCH_DISTRIBUTED_OPERATION_TYPES", "TORCH_LAUNCH_PARAMS"), INNER),
    **dict.fromkeys(("ComputeEnvironment", "SageMakerDistributedType", "PrepareForLaunch"), STARTING),
    **dict.fromkeys(("convert_dict_to_env_variables", "debug_launcher", "install_xla"), STARTING),
    **dict.fromkeys(("prepare_multi_gpu_env", "prepare_sagemager_args_inputs", "prepare_tpu"), STARTING),
    **dict.fromkeys(("prepare_simple_launcher_cmd_env", "write_basic_config"), STARTING),
    **dict.fromkeys(
        ("prepare_data_loader", "SeedableRandomSampler", "BatchSamplerShard", "IterableDatasetShard"), LOADER
    ),
    "add_model_config_to_megatron_parser": "any family of mt is prepared; MegatronLMPlugin has no parser of its own",
    "is_habana_gaudi1": "mt runs on CPUs and CUDA GPUs",
    "is_peft_model": "isinstance(model, peft.PeftModel) says it",
    **dict.fromkeys(("commands", "hooks", "inference", "launchers", "optimizer", "scheduler"), MODULES),
    **dict.fromkeys(("ao", "bnb", "constants", "environment", "fsdp_utils", "imports"), MODULES),
    **dict.fromkeys(("launch", "megatron_lm", "memory", "modeling", "offload", "other"), MODULES),
    **dict.fromkeys(("random", "torch_xla", "transformer_engine", "versions"), MODULES),
}
"""Names of accelerate and accelerate.utils."""
PACKAGES: Mapping[str, str] = {
    "comet_ml": "comet_ml",
    "bnb": "bitsandbytes",
    "tensorboard": "tensorboard",
    "megatron_lm": "mt_accelerate",
    "torchdata_stateful_dataloader": "torchdata.stateful_dataloader",
}
"""is_<key>_available -> the package, where it has another name."""
ELSEWHERE = ("habana_gaudi1", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xccl", "xpu", "torch_xla", "rocm")
"""Devices that mt does not run on."""


def available(name: str) -> Any:
    """The function is_<package>_available; None for other names."""
    match = re.fullmatch(r"is_(\w+?)_available", name)
    if match is None:
        return None
    package = match.group(1)
    if package == "cuda":
        return lambda *arguments: find_spec("torch") is not None and _has_cuda()
    if package in ELSEWHERE or package.startswith(("4bit", "8bit", "fp8", "weights", "transformer_engine_mx")):
        return lambda *arguments, **options: package == "weights_only"
    return lambda *arguments, **options: _is_installed(PACKAGES.get(package, package))


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def refuse_name(module: str, name: str) -> Any:
    """Raises RefusedNameError with the reason, AttributeError for a name that Accelerate does not have."""
    if name in NAMES:
        raise RefusedNameError(f"{module}.{name}: {NAMES[name]}")
    raise AttributeError(f"mt has no {name} of {module}")

"""Which names the models of a version of Megatron-Core give their parameters, without computing anything.

    python declared_names.py OUTPUT VERSION=FOLDER ...

writes `tests/ckpt/megatron/declared_names.json`: for each version installed in a folder (`pip install --no-deps
--target FOLDER megatron-core==VERSION`), oldest first, the state dictionary's names with shapes, the keys of the
distributed checkpoint and the order of the parameters, with Megatron's own layers and with Transformer Engine's. The
latter is replaced by modules that have its parameters and compute nothing. It runs in the environment of
`environment.py`, each version in a process; what OUTPUT.parts has of a version is not asked for again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import json
import logging
import os
import sys
import warnings
from importlib.machinery import ModuleSpec as ImportSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda_on_cpu
import packaging.version
import torch
import torch._dynamo
import torch.distributed.checkpoint  # once for all versions, which take seconds to import it
from local_hybrid_layers import install_kernels, modelopt_hybrid_stack_spec
from torch import nn

IMPLEMENTATIONS = ("local", "transformer_engine")
VERSIONS = {"transformer-engine": "2.9.0", "mamba-ssm": "2.2.4", "causal-conv1d": "1.5.3"}
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "activation_func": nn.functional.silu,
}
LATENT = {
    **LLAMA,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "qk_layernorm": True,
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": [0, 1]}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "qwen3": {**LLAMA, "qk_layernorm": True},
    "mixtral": {**LLAMA, **EXPERTS},
    "grouped": {**LLAMA, **EXPERTS, "moe_grouped_gemm": True},
    "mixed": {**LLAMA, **SHARED},
    "latent": LATENT,
    "prediction": {**LATENT, "mtp_num_layers": 1},
}
MIXER = {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 4, "mamba_num_heads": 8}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MM", {"hidden_size": 256}),
    "hybrid": ("M*M-", MIXER),
    "hybrid_experts": ("M*E", {**MIXER, **EXPERTS, "moe_grouped_gemm": True}),
}
VOCAB, POSITIONS = 128, 16


def main() -> None:
    output, *folders = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    cuda_on_cpu.apply_before_import()
    install_kernels()
    parts = Path(f"{output}.parts")
    parts.mkdir(exist_ok=True)
    found = []
    for version, folder in (entry.split("=") for entry in folders):
        for implementation in IMPLEMENTATIONS:
            part = parts / f"{version}.{implementation}.json"
            if not part.exists():
                in_a_process(part, folder, implementation)
            found.append((version.rpartition(".")[0], implementation, json.loads(part.read_text())))
    Path(output).write_text(as_text(kinds(found)))


def as_text(names: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """JSON with a line for each kind of names."""
    models = []
    for model, implementations in names.items():
        lists = []
        for implementation, kinds_of_it in implementations.items():
            lines = ",\n  ".join(json.dumps(kind, separators=(",", ":")) for kind in kinds_of_it)
            lists.append(f' "{implementation}": [\n  {lines}\n ]' if kinds_of_it else f' "{implementation}": []')
        models.append(f'"{model}": {{\n' + ",\n".join(lists) + "\n}")
    return "{\n" + ",\n".join(models) + "\n}\n"


def in_a_process(part: Path, folder: str, implementation: str) -> None:
    child = os.fork()
    if not child:
        part.with_suffix(".new").write_text(json.dumps(declare(folder, implementation)))
        os.replace(part.with_suffix(".new"), part)
        os._exit(0)
    os.waitpid(child, 0)


def kinds(found: list[tuple[str, str, dict[str, Any]]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Model -> implementation -> what its names are, each with the versions that have them."""
    result: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for version, implementation, models in found:
        for model, names in models.items():
            known = result.setdefault(model, {}).setdefault(implementation, [])
            same = [kind for kind in known if {**kind, "versions": []} == {"versions": [], **names}]
            if same:
                same[0]["versions"].append(version)
            elif "error" not in names:
                known.append({"versions": [version], **names})
    return result


def declare(folder: str, implementation: str) -> dict[str, Any]:
    """Model -> names of the two formats, or why the version does not make it."""
    start(folder, implementation)
    names: dict[str, Any] = {}
    for model in (*DECODERS, *HYBRIDS, "bert", "t5"):
        try:
            names[model] = _names(make(model, implementation == "local"))
        except Exception as error:  # what a version does not have is an answer
            names[model] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return names


def start(folder: str, implementation: str) -> None:
    """Imports the version that is installed in a folder, as the one rank of a run."""
    sys.path.insert(0, folder)
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda *args: None  # type: ignore[assignment]
    _stand_in_for_packages(implementation)
    os.environ.update(MASTER_ADDR="localhost", RANK="0", WORLD_SIZE="1", NVTE_FLASH_ATTN="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    random.model_parallel_cuda_manual_seed(1)
    _accept_latent_attention()


def _names(model: Any) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

    state = model.state_dict_for_save_checkpoint()
    plain = {name: list(value.shape) if _is_weight(name, value) else None for name, value in state.items()}
    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    distributed: dict[str, Any] = {}
    for value in nested_values(sharded):
        if isinstance(value, ShardedObject):
            distributed[value.unique_key] = None
        elif isinstance(value, ShardedTensor):
            distributed[value.key] = list(value.global_shape)
    return {"torch": plain, "torch_dist": distributed, "parameters": [name for name, _ in model.named_parameters()]}


def _is_weight(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and not name.endswith("_extra_state")


# -- models ---------------------------------------------------------------------------------------------


def make(model: str, local: bool) -> Any:
    if model in DECODERS:
        return _decoder(DECODERS[model], local)
    if model in HYBRIDS:
        return _hybrid(*HYBRIDS[model], local)
    return _bert(local) if model == "bert" else _t5(local)


def _config(values: dict[str, Any]) -> Any:
    from megatron.core.transformer import transformer_config

    latent = values.get("multi_latent_attention", False)
    cls = transformer_config.MLATransformerConfig if latent else transformer_config.TransformerConfig
    fields = {field.name for field in dataclasses.fields(cls)}
    quiet = dict.fromkeys(("gradient_accumulation_fusion", "bias_dropout_fusion", "perform_initialization"), False)
    given = {**SIZES, **quiet, "use_cpu_initialization": True, **values}
    if lacking := {name for name in values if name.startswith(("mamba_", "moe_"))} - fields - {"mamba_num_heads"}:
        raise ValueError(f"the version has no {sorted(lacking)}")
    return cls(**{name: value for name, value in given.items() if name in fields})


def _call(function: Any, *args: Any, **given: Any) -> Any:
    """With those of the arguments that a version knows."""
    parameters = inspect.signature(function).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return function(*args, **{name: value for name, value in given.items() if anything or name in parameters})


def _decoder(values: dict[str, Any], local: bool) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = _config(values)
    if isinstance(values.get("moe_layer_freq"), list):
        make_spec: Any = gpt_layer_specs.get_gpt_decoder_block_spec
        spec = _call(make_spec, config, use_transformer_engine=not local, normalization=config.normalization)
    else:
        make_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        spec = _call(
            gpt_layer_specs.get_gpt_layer_local_spec if local else make_spec,
            num_experts=values.get("num_moe_experts"),
            moe_grouped_gemm=values.get("moe_grouped_gemm", False),
            qk_layernorm=values.get("qk_layernorm", False),
            multi_latent_attention=values.get("multi_latent_attention", False),
            normalization=config.normalization,
        )
    more = {}
    if "mtp_num_layers" in values:
        make_block = gpt_layer_specs.get_gpt_mtp_block_spec
        more["mtp_block_spec"] = _call(make_block, config, spec, use_transformer_engine=not local)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=POSITIONS,
        position_embedding_type="rope" if values else "learned_absolute",
        share_embeddings_and_output_weights=not values,
        **more,
    )


def _bert(local: bool) -> Any:
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.bert.bert_model import BertModel

    if local:
        spec = bert_layer_specs.bert_layer_local_spec
    elif hasattr(bert_layer_specs, "get_bert_layer_with_transformer_engine_spec"):
        spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    else:
        spec = bert_layer_specs.bert_layer_with_transformer_engine_spec
    return BertModel(
        config=_config({}),
        num_tokentypes=2,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=POSITIONS,
        share_embeddings_and_output_weights=True,
    )


def _t5(local: bool) -> Any:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    kind = "local" if local else "transformer_engine"
    if local:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        t5_spec.TENorm = WrappedTorchNorm  # the norm behind the layers
    encoder, decoder = (getattr(t5_spec, f"get_t5_{part}_with_{kind}_block_spec") for part in ("encoder", "decoder"))
    return _call(
        T5Model,
        config=_config({}),
        encoder_config=_config({}),
        transformer_encoder_layer_spec=encoder(SIZES["num_layers"]),
        transformer_decoder_layer_spec=decoder(SIZES["num_layers"]),
        vocab_size=VOCAB,
        max_sequence_length=POSITIONS,
        share_embeddings_and_output_weights=True,
    )


def _hybrid(pattern: str, values: dict[str, Any], local: bool) -> Any:
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model
    except ImportError:
        from megatron.core.models.mamba.mamba_model import MambaModel as Model
    config = _config(
        {
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "num_layers": len(pattern),
            "is_hybrid_model": True,
            **values,
        }
    )
    spec = modelopt_hybrid_stack_spec() if local else _hybrid_spec()
    known = inspect.signature(Model).parameters
    argument = "hybrid_layer_pattern" if "hybrid_layer_pattern" in known else "hybrid_override_pattern"
    return _call(
        Model,
        config,
        **{argument: pattern},
        mamba_stack_spec=spec,
        hybrid_stack_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=POSITIONS,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
    )


def _hybrid_spec() -> Any:
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
    except ImportError:
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
    return spec


def _accept_latent_attention() -> None:
    """Megatron's own attention does not take the sizes that latent attention gives it; no parameter depends on them."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    original = DotProductAttention.__init__
    if "k_channels" in inspect.signature(original).parameters:
        return

    def init(self: Any, *args: Any, k_channels: object = None, v_channels: object = None, **given: Any) -> None:
        original(self, *args, **given)

    DotProductAttention.__init__ = init


# -- packages that need a GPU ---------------------------------------------------------------------------


class _Engine(nn.Module):
    """What Megatron looks up in every module of Transformer Engine."""

    def __init__(self, parallel_mode: str | None = None) -> None:
        super().__init__()
        self.parallel_mode, self.te_return_bias, self.tp_size = parallel_mode, False, 1
        self.fp8 = self.fp8_calibration = self.fp8_initialized = self.primary_weights_in_fp8 = False
        self.fp8_meta: dict[str, object] = {"fp8_checkpoint": False}

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: object) -> None: ...

    def add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class Linear(_Engine):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, **given: Any) -> None:
        super().__init__(given.get("parallel_mode"))
        self.use_bias, self.in_features, self.out_features = bias, in_features, out_features
        self.add("weight", out_features, in_features)
        if bias:
            self.add("bias", out_features)


class LayerNormLinear(_Engine):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, **given: Any) -> None:
        super().__init__(given.get("parallel_mode"))
        self.use_bias = bias
        self.add("layer_norm_weight", in_features)
        if given.get("normalization", "LayerNorm") == "LayerNorm":
            self.add("layer_norm_bias", in_features)
        self.add("weight", out_features, in_features)
        if bias:
            self.add("bias", out_features)


class GroupedLinear(_Engine):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, bias: bool = True, **given: Any) -> None:
        super().__init__(given.get("parallel_mode"))
        self.num_gemms, self.use_bias = num_gemms, bias
        for number in range(num_gemms):
            self.add(f"weight{number}", out_features, in_features)
            if bias:
                self.add(f"bias{number}", out_features)


class RMSNorm(_Engine):
    """A norm has no FP8 state."""

    get_extra_state = nn.Module.get_extra_state  # type: ignore[assignment]

    def __init__(self, hidden_size: int | None = None, normalized_shape: int | None = None, **given: Any) -> None:
        super().__init__()
        self.size = hidden_size or normalized_shape or 0
        self.add("weight", self.size)


class LayerNorm(RMSNorm):
    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.add("bias", self.size)


class DotProductAttention(_Engine):
    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__()


class _AnyModule(ModuleType):
    """Has every class that is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {"__init__": lambda self, *args, **given: nn.Module.__init__(self)})


ENGINE_MODULES = [
    "attention",
    "attention.rope",
    "attention.dot_product_attention",
    "attention.dot_product_attention.utils",
    "distributed",
    "fp8",
    "float8_tensor",
    "tensor",
    "tensor.utils",
    "permutation",
    "cpu_offload",
    "cross_entropy",
    "ops",
    "module",
    "module.base",
    "router",
    "optimizers",
    "constants",
    "cpp_extensions",
    "custom_recipes",
    "utils",
    "jit",
    "quantization",
    "graph",
    "export",
]


def _stand_in_for_packages(implementation: str) -> None:
    original = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSIONS.get(name.replace("_", "-")) or original(name)
    _module("pkg_resources", packaging=packaging)
    _module("mamba_ssm.ops.triton.selective_state_update", selective_state_update=None)
    if implementation == "local":
        return
    layers = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
    offload = {"get_cpu_offload_context": lambda *args, **given: (contextlib.nullcontext(), lambda tensor: tensor)}
    _module("transformer_engine", __version__=VERSIONS["transformer-engine"])
    for name in ("common", "common.recipe", "debug", "debug.pytorch"):
        _module(f"transformer_engine.{name}")
    _module("transformer_engine.pytorch", **{layer.__name__: layer for layer in layers}, **offload)
    for name in ENGINE_MODULES:
        _module(f"transformer_engine.pytorch.{name}", **(offload if name == "cpu_offload" else {}))
    _module("transformer_engine_torch")


def _module(name: str, **content: Any) -> None:
    module = _AnyModule(name)
    module.__path__ = []
    module.__spec__ = ImportSpec(name, None, is_package=True)
    module.__dict__.update(content)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)


if __name__ == "__main__":
    main()

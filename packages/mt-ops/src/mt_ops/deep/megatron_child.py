"""One side of `mt compare --deep`, computed by Megatron-Core: a GPT checkpoint of its own, in one process on a CPU.

Runs in an environment with megatron-core and without mt. The model is what the checkpoint's arguments say, of
Megatron's own layers ("local"), and its checkpoint is loaded by Megatron. Names are the same as mt's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mt_ops.deep import megatron_on_cpu
from mt_ops.deep.tensor_files import ANSWER, BACKWARD, FORWARD, PARAMETERS, REQUEST, TOKENS, save_groups, step_file

ARGUMENTS = (
    *("--transformer-impl=local", "--use-cpu-initialization", "--attention-softmax-in-fp32"),
    *("--distributed-backend=gloo", "--no-gradient-accumulation-fusion", "--no-bias-dropout-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--exit-on-missing-checkpoint", "--no-load-rng", "--no-load-optim"),
    *("--use-checkpoint-args", "--train-iters=1", "--micro-batch-size=1", "--lr=0.001"),
)
HOW_IT_IS_COMPUTED = {
    *("transformer_impl", "use_cpu_initialization", "attention_softmax_in_fp32", "gradient_accumulation_fusion"),
    *("bias_dropout_fusion", "bias_activation_fusion", "apply_rope_fusion", "masked_softmax_fusion"),
    *("persist_layer_norm", "attention_backend", "hidden_dropout", "attention_dropout", "params_dtype"),
    *("fp16", "bf16", "moe_grouped_gemm", "moe_token_dispatcher_type", "perform_initialization"),
    *("sequence_parallel", "deterministic_mode", "batch_p2p_comm", "overlap_p2p_comm"),
}
"""Fields of the transformer's configuration that are not taken from the checkpoint; nor are sizes of a layout."""
OTHERS = (
    *("multi_latent_attention", "quick_geglu", "position_embedding_type", "rotary_base", "rotary_percent"),
    *("use_rope_scaling", "rope_scaling_factor", "untie_embeddings_and_output_weights", "add_position_embedding"),
)
"""Arguments of the model that no field of the transformer's configuration is called."""


def compute(folder: Path) -> None:
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    model = _model(Path(request["path"]))
    for number, tokens in sorted(load_file(folder / TOKENS).items()):
        save_groups(_recording(model, tokens, request["vocabulary"]), step_file(folder, int(number)))
        _update(model, request["rate"])
    (folder / ANSWER).write_text(json.dumps({"vocabulary": request["vocabulary"]}), encoding="utf-8")


# -- the model --------------------------------------------------------------------------------------


def _model(path: Path) -> nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import checkpointing, training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    args = _arguments(path)
    _start(args)

    def provide(pre_process: bool = True, post_process: bool = True, **options: Any) -> Any:
        config = gpt_config_from_args(args)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return GPTModelBuilder(config).build_model(groups, pre_process, post_process, None)

    chunks = training.get_model(provide, wrap_with_ddp=False)
    _refuse_second_try(chunks[0])
    checkpointing.load_checkpoint(chunks, None, None, strict=True)
    model: nn.Module = chunks[0].eval()
    return model


def _arguments(path: Path) -> Namespace:
    """Arguments as Megatron makes them of its checkpoint, which names the model."""
    from megatron.training import arguments, checkpointing

    is_distributed = any(path.rglob("metadata.json")) or any(path.rglob(".metadata"))
    checkpoint_format = "torch_dist" if is_distributed else "torch"
    sys.argv = ["mt", *ARGUMENTS, f"--load={path}", f"--ckpt-format={checkpoint_format}"]
    args: Namespace = arguments.parse_args()
    _, stored = checkpointing.load_args_from_checkpoint(args)
    _take_model(args, stored)
    args.hidden_dropout = args.attention_dropout = 0.0
    args.moe_grouped_gemm, args.moe_token_dispatcher_type = False, "alltoall"
    args.seq_length = args.seq_length or args.max_position_embeddings
    arguments.validate_args(args)
    return args


def _take_model(args: Namespace, stored: Namespace) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    for name in [*(field.name for field in dataclasses.fields(MLATransformerConfig)), *OTHERS]:
        is_model = name not in HOW_IT_IS_COMPUTED and not name.endswith("parallel_size")
        if is_model and hasattr(args, name) and hasattr(stored, name):
            setattr(args, name, getattr(stored, name))


def _start(args: Namespace) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.training import global_vars
    from torch import distributed

    global_vars.set_global_variables(args, build_tokenizer=False)
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(args.seed)


FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names of norms in Transformer Engine's layers -> in Megatron's own."""


def _refuse_second_try(model: Any) -> None:
    """Megatron loads what does not fit a second time, not strictly, and goes on."""
    strictly = model.load_state_dict

    def load_state_dict(state: Any, strict: bool = True) -> Any:
        local_state = {_local_name(name): value for name, value in state.items() if not name.endswith("_extra_state")}
        try:
            return strictly(local_state, strict=True)
        except RuntimeError as error:
            raise SystemExit(f"Megatron-Core does not load this checkpoint: {error}") from error

    model.load_state_dict = load_state_dict


def _local_name(name: str) -> str:
    for fused, unfused in FUSED_NORMS.items():
        name = name.replace(fused, unfused)
    return name


# -- what it computes -------------------------------------------------------------------------------

Groups = dict[str, dict[str, Tensor]]


def _recording(model: nn.Module, tokens: Tensor, vocabulary: int) -> Groups:
    """Outputs, gradients at them and gradients of parameters by name. tokens: [batch, sequence]."""
    model.zero_grad(set_to_none=True)
    groups: Groups = {FORWARD: {}, BACKWARD: {}, PARAMETERS: {}}
    length = tokens.shape[1]
    with _hooks(model, groups):
        hidden = torch.ones(1, 1, length, length).tril() < 0.5
        logits = model(tokens, torch.arange(length)[None].expand_as(tokens), hidden)[..., :vocabulary]
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
    groups[FORWARD]["logits"] = logits.detach()
    named = model.named_parameters()
    groups[PARAMETERS] = {_plain(name): p.grad.detach().clone() for name, p in named if p.grad is not None}
    return groups


@contextmanager
def _hooks(model: nn.Module, groups: Groups) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(_keep(_plain(name), groups))
                stack.callback(handle.remove)
        yield


def _plain(name: str) -> str:
    """Without the wrapper of 16-bit models."""
    return name.removeprefix("module.")


def _keep(name: str, groups: Groups) -> Callable[[nn.Module, Any, Any], None]:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor, bias = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim != 3:
            return
        # Megatron adds the bias of some layers later, and mt in the layer.
        with_bias = tensor + bias if isinstance(bias, Tensor) and bias.ndim == 1 else tensor
        groups[FORWARD][name] = _batch_first(name, with_bias.detach())
        if tensor.requires_grad:

            def keep_gradient(gradient: Tensor) -> None:
                groups[BACKWARD][name] = _batch_first(name, gradient.detach())

            tensor.register_hook(keep_gradient)

    return keep


def _batch_first(name: str, x: Tensor) -> Tensor:
    """[sequence, batch, features] -> [batch, sequence, features], which single embeddings have already."""
    return x.clone() if name.endswith("_embeddings") else x.transpose(0, 1).contiguous()


def _update(model: nn.Module, rate: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)


if __name__ == "__main__":
    for variable, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        os.environ[variable] = value
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    megatron_on_cpu.before_import()
    import megatron.core  # noqa: F401

    megatron_on_cpu.after_import()
    compute(Path(sys.argv[1]))

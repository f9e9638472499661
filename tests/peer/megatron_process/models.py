"""Megatron's arguments and models for a job: its own parser, its own checks, its own layers (no Transformer Engine)."""

from __future__ import annotations

import copy
import dataclasses
import sys
from argparse import Namespace
from typing import Any

ON_CPU = [
    "--transformer-impl=local",
    "--use-cpu-initialization",
    "--attention-softmax-in-fp32",
    "--distributed-backend=gloo",
    "--no-gradient-accumulation-fusion",
    "--no-bias-dropout-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-rope-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--exit-on-missing-checkpoint",
    "--no-load-rng",
    "--no-save-rng",
    "--train-iters=100",
    "--micro-batch-size=1",
    "--lr=0.001",
]
NOT_OF_THE_MODEL = {
    "transformer_impl",
    "use_cpu_initialization",
    "attention_softmax_in_fp32",
    "gradient_accumulation_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "attention_backend",
    "hidden_dropout",
    "attention_dropout",
    "params_dtype",
    "fp16",
    "bf16",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "num_layers",
    "perform_initialization",
    "sequence_parallel",
    "deterministic_mode",
    "batch_p2p_comm",
    "overlap_p2p_comm",
}
"""Fields of the transformer's configuration that say how it is computed, not what; and num_layers, which a pattern of
layers replaces. Layout sizes end in `_size` and are never taken."""
OTHERS = (
    *("multi_latent_attention", "bert_binary_head", "quick_geglu"),
    *("use_rope_scaling", "rope_scaling_factor", "position_embedding_type", "rotary_base"),
    *("rotary_scaling_factor", "mscale", "mscale_all_dim", "yarn_original_max_position_embeddings"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int"),
)
"""Arguments of the model that no field of the transformer's configuration is called."""


def parse(request: dict[str, Any]) -> Namespace:
    """Arguments as `parse_and_validate_args` makes them with --use-checkpoint-args when something is loaded.

    That takes only some of the model's arguments from the checkpoint; the others a user gives on the command line,
    here they are taken from it too.
    """
    from megatron.training import arguments, checkpointing

    given = list(request["arguments"])
    if request["load"]:
        given += [f"--load={request['load']}", "--use-checkpoint-args", f"--ckpt-format={request['load_format']}"]
        given += [] if request["load_optimizer"] else ["--no-load-optim"]
    sys.argv = ["peer", *ON_CPU, *given]
    args = arguments.parse_args()
    stored = Namespace()
    if request["load"]:
        _, stored = checkpointing.load_args_from_checkpoint(args)
        _take_model(args, stored, given)
    args.hidden_dropout = args.attention_dropout = 0.0
    args.moe_grouped_gemm = False
    args.moe_token_dispatcher_type = "alltoall"
    if args.seq_length is None:
        args.seq_length = args.max_position_embeddings
    arguments.validate_args(args)
    if request["family"] == "t5":
        args.encoder_num_layers, args.decoder_num_layers = _t5_layers(args, stored)
    return args


def _t5_layers(args: Namespace, stored: Namespace) -> tuple[int, int]:
    """Of the encoder and the decoder: the arguments `encoder_num_layers` and `decoder_num_layers` of a stored run."""
    encoder, decoder = (getattr(stored, name, None) for name in ("encoder_num_layers", "decoder_num_layers"))
    return encoder or args.num_layers, decoder or args.num_layers


def _take_model(args: Namespace, stored: Namespace, given: list[str]) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    said = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in given}
    for name in [*(field.name for field in dataclasses.fields(MLATransformerConfig)), *OTHERS]:
        if name in NOT_OF_THE_MODEL or name in said or name.endswith("parallel_size"):
            continue
        if hasattr(args, name) and hasattr(stored, name):
            setattr(args, name, getattr(stored, name))


def build(args: Namespace, family: str, pre_process: bool, post_process: bool, vp_stage: int | None, pg: Any) -> Any:
    return BUILDERS[family](args, pre_process, post_process, vp_stage, pg)


def _gpt(args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None, pg: Any) -> Any:
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    config = _plain(gpt_config_from_args(args))
    return GPTModelBuilder(config).build_model(pg, pre_process, post_process, vp_stage)


def _hybrid(args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None, pg: Any) -> Any:
    from local_hybrid_layers import local_hybrid_stack_spec

    return _hybrid_of(local_hybrid_stack_spec(), args, pre_process, post_process, vp_stage, pg)


def _local_hybrid(args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None, pg: Any) -> Any:
    from local_hybrid_layers import modelopt_hybrid_stack_spec

    return _hybrid_of(modelopt_hybrid_stack_spec(), args, pre_process, post_process, vp_stage, pg)


def _hybrid_of(spec: Any, args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None, pg: Any) -> Any:
    from megatron.training.argument_utils import hybrid_config_from_args
    from megatron.training.models.hybrid import HybridModelBuilder

    config = _plain(hybrid_config_from_args(args))
    config.hybrid_stack_spec = spec
    config.use_mamba_mem_eff_path = False
    return HybridModelBuilder(config).build_model(pg, pre_process, post_process, vp_stage)


def _bert(args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None, pg: Any) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config=_config(args),
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=True,
        pre_process=pre_process,
        post_process=post_process,
        add_binary_head=args.bert_binary_head,
        vp_stage=vp_stage,
        pg_collection=pg,
    )


def _t5(args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None, pg: Any) -> Any:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    t5_spec.TENorm = WrappedTorchNorm  # the norm behind the layers, which is Transformer Engine's even in "local" specs
    config = _config(args)
    config.num_layers = args.decoder_num_layers
    encoder = copy.deepcopy(config)
    encoder.num_layers = args.encoder_num_layers
    return T5Model(
        config=config,
        encoder_config=encoder,
        transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_local_block_spec(encoder.num_layers),
        transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_local_block_spec(config.num_layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        parallel_output=True,
    )


def _config(args: Namespace) -> Any:
    from megatron.training.argument_utils import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    config.batch_p2p_comm = False
    return config


def _plain(config: Any) -> Any:
    config.batch_p2p_comm = False
    return config


BUILDERS = {"gpt": _gpt, "hybrid": _hybrid, "local_hybrid": _local_hybrid, "bert": _bert, "t5": _t5}

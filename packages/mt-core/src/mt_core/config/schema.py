"""The sections of the configuration. The text under a field is its help.

Keys are Megatron's argument names with underscores. Sections that are chosen by name (a model family, a
tokenizer, a data set, an optimizer, a schedule) are subclasses registered by plugins; the selecting key
stands in the base class here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, SerializeAsAny

from mt_core.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    Seed,
    used_when,
)
from mt_core.config.parallel import ParallelConfig
from mt_core.specs import PLAIN_MODULE

AUTO_LOSS = "auto"
AUTO_PROMPT = "auto"
WeightDecayStyle = Literal["constant", "linear", "cosine"]
Activation = Literal[
    "gelu",
    "gelu_tanh",
    "relu",
    "squared_relu",
    "silu",
    "quick_gelu",
    "swiglu",
    "geglu",
    "geglu_tanh",
    "clamped_swiglu",
    "limited_swiglu",
]
"""Activations of the feed-forward block (mt_core.nn.activations); here, so that configurations are checked without
torch."""


TokenIds = int | list[int]
KeptTokenIds = dict[str, TokenIds | dict[str, TokenIds | dict[str, TokenIds]]]
"""Ids, and tables of them, of at most two parts within one another."""


class ModelConfig(Section):
    """What every model family has; the family's own config type adds the rest."""

    selector: ClassVar[str | None] = "family"

    family: str
    """Name of the model family, as `mt models` lists it."""
    vocab_size: PositiveInt | None = None
    """True number of token ids, without padding. Default: the tokenizer's."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """The embedding table in memory is padded to a multiple of this times tensor_model_parallel_size.
    Padding rows are never predicted and never stored."""
    kept_token_ids: KeptTokenIds = Field(default_factory=dict)
    """Ids of tokens that config.json of a converted model names and nothing here computes with, by their keys there,
    such as video_token_id and text_config.bos_token_id. They are written into config.json again. [] stands for null."""

    # What a family may say of its shape beyond its keys.

    @property
    def stacked_layers(self) -> int | None:
        """Layers that pipeline stages divide, of all stacks together; None: there is no stack. By default the key
        `num_layers`, which most families have."""
        return getattr(self, "num_layers", None)

    @property
    def media_token_ids(self) -> frozenset[int]:
        """Ids in whose place texts have features of pictures, videos or sounds; random texts are without them."""
        return frozenset()

    @property
    def pipeline_layout(self) -> str | None:
        """The stages that the model's own keys prescribe, as parallel.pipeline_model_parallel_layout has them."""
        return None


class PlainModuleConfig(ModelConfig):
    """A torch.nn.Module that a program gives to Engine or Trainer: the family where [model] is empty."""

    family: str = PLAIN_MODULE


class TokenizerConfig(Section):
    """Text to ids."""

    selector: ClassVar[str | None] = "tokenizer_type"

    tokenizer_type: str = "ByteLevelTokenizer"
    """Name of the tokenizer; `mt plugins` lists them."""


class DataConfig(Section):
    """Where samples come from and how they are cut."""

    selector: ClassVar[str | None] = "dataset_type"

    dataset_type: str = "builtin"
    """Name of the data set; `builtin` is the text that every Python carries."""
    seq_length: PositiveInt = 128
    """Input positions of a sample."""
    reset_position_ids: bool = False
    """Positions start again at each document within a sample."""
    reset_attention_mask: bool = False
    """Documents packed in one sample do not see one another."""
    eod_mask_loss: bool = False
    """Positions whose input is the end-of-document id do not count in the loss."""
    num_workers: NonNegativeInt = 1
    """Threads that read samples ahead; 0 reads them in the training loop. Does not change any sample."""
    read_by: Literal["each", "first"] = "each"
    """Ranks that share a model take the same samples: each reads them, or the first one reads and sends them."""
    prefetch_batches: PositiveInt = 2
    """Global batches held ready by the readers."""

    # What a data set may say of its samples beyond its keys.

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the task, reported by evaluations unless train.eval_metrics names others."""
        return ()


class TrainConfig(Section):
    """The training loop."""

    micro_batch_size: PositiveInt = 8
    """Samples that go through the model at once on a data-parallel rank."""
    global_batch_size: PositiveInt | None = None
    """Samples of an optimizer step over all ranks. Default: micro_batch_size times data parallel size."""
    rampup_batch_size: tuple[PositiveInt, PositiveInt, NonNegativeInt] | None = Field(None, strict=False)
    """[start, increment, samples]: the global batch grows from start to global_batch_size by increments,
    evenly over the first so many samples."""
    train_iters: PositiveInt | None = None
    """Optimizer steps to train. Give this, train_samples or train_epochs."""
    train_samples: PositiveInt | None = None
    """Samples to train. Give this, train_iters or train_epochs."""
    train_epochs: PositiveInt | None = None
    """Times to go through the training set, each in an order of its own and without an incomplete last batch; the run
    evaluates and saves at the end of each. Give this, train_iters or train_samples."""
    exit_iteration: PositiveInt | None = None
    """Save and stop after this step, as after a signal; the schedule stays that of the whole training."""
    exit_duration_in_mins: PositiveFloat | None = None
    """Save and stop after the step that ends so many minutes after training began, as after a signal: before the time
    of a job ends. Also after a resume the minutes are those of this process."""
    eval_interval: PositiveInt | None = 100
    """Steps between evaluations; null never evaluates while training."""
    eval_iters: NonNegativeInt = 10
    """Global batches of an evaluation."""
    full_validation: bool = False
    """An evaluation takes every sample of each validation set once, in place of eval_iters global batches."""
    eval_metrics: list[str] | None = None
    """Metrics of the predictions on each validation set, of those that the loss has (accuracy, f1, ... of the loss
    `classification`). Default: those of the data set's task."""
    verify_replicas_interval: PositiveInt | None = None
    """Steps between checks that processes which should have the same weights have the same bits; null never checks."""
    seed: Seed = 1234
    """Seed of initialization, dropout and the order of samples: 0 to 4294967295."""
    deterministic: bool = False
    """Bitwise repeatable; refuses options that cannot be, by name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. `auto` takes the GPU when there is one, and says so."""
    check_memory: bool = True
    """Refuse to start when weights, gradients and optimizer state alone are more than the free memory of a process."""
    keep_freed_memory: bool = True
    """On a CPU with glibc: freed tensors stay with the process, which makes steps up to a quarter faster, where
    weights, gradients and optimizer state take at most a quarter of the free memory. Peak memory may grow."""
    num_threads: PositiveInt | None = None
    """CPU threads of torch. Default: torch's own choice."""
    loss: str = AUTO_LOSS
    """Name of the loss, or `auto`: the model family's own loss, where possible in the implementation that does not
    store logits. Does not change values beyond rounding."""
    batch_source: str = "dataset"
    """What gives the batches: `dataset`, or a registered source, such as of samples that the model draws."""
    loss_normalization: Literal["weights", "tokens", "sequences", "constant"] = "weights"
    """What the sum of a step's losses, each times its weight in `loss_mask`, is divided by: the sum of the weights
    over the global batch; the number of positions with a weight above 0; the number of sequences, each of which
    counts by the weighted mean of its positions; or loss_divisor. The first two are the same for weights of 0 and 1."""
    loss_divisor: PositiveFloat | None = used_when(None, loss_normalization="constant")
    """What the sum of the losses of a global batch is divided by."""
    deferred_metrics: Literal["auto", "never", "always"] = "auto"
    """The metrics of a step are read, and passed to callbacks, while the next step runs, so that the host does not wait
    for the GPU. auto: on a GPU, where nothing needs them at once."""
    compile: Literal["none", "blocks"] = "none"
    """`blocks` compiles each layer by torch.compile."""
    cuda_graphs: Literal["none", "blocks", "step"] = "none"
    """`blocks` launches each layer's forward and backward pass as one CUDA graph, `step` all passes of a step with the
    reduction and norm of its gradients. See docs/guides/kernels.md."""
    cuda_graph_warmup_steps: PositiveInt = used_when(3, cuda_graphs=("blocks", "step"))
    """Steps before anything is captured."""
    callbacks: list[str] = Field(default_factory=list)
    """Names of callbacks to add to those that are always on."""
    early_stop_patience: PositiveInt | None = None
    """Stop after so many evaluations in which early_stop_metric has not improved. Default: never."""
    early_stop_metric: str | None = None
    """A loss or metric of a validation set, as in checkpoint.best_metric. Default: valid_loss."""
    early_stop_min_delta: NonNegativeFloat = 0.0
    """Smaller improvements count as none."""
    frozen_parameters: list[str] = Field(default_factory=list)
    """Canonical names of parameters that are not trained (mt ckpt inspect lists them), with * for any characters."""
    sample_prompt: str | None = AUTO_PROMPT
    """A text is generated from this prompt at the end; null or an empty text generates none. `auto`: words of the
    validation text (data.dataset_type "gpt" and "fim"), "def " for the built-in text, and none for other data."""
    sample_tokens: PositiveInt = 200
    """Tokens of that text."""


class OptimizerConfig(Section):
    """The optimizer; each one's own type adds its parameters."""

    selector: ClassVar[str | None] = "optimizer"

    optimizer: str = "adam"
    """Name of the optimizer: adam is AdamW, as in Megatron."""
    lr: NonNegativeFloat = 1e-3
    """Highest learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Lowest learning rate of the schedule."""
    decoupled_lr: NonNegativeFloat | None = None
    """Highest learning rate of the embedding and the output layer. Default: lr."""
    decoupled_min_lr: NonNegativeFloat | None = None
    """Lowest learning rate of these two, with decoupled_lr. Default: min_lr."""
    weight_decay: NonNegativeFloat = used_when(0.01, weight_decay_incr_style="constant")
    """Decoupled weight decay, on weights of two dimensions and more unless no_weight_decay says which."""
    no_weight_decay: list[str] | None = None
    """Names of the parameters without weight decay, in which * stands for any characters; all others are decayed.
    Default: biases and norms."""
    weight_decay_incr_style: WeightDecayStyle = "constant"
    """Weight decay over the training: constant, or along a line or half a cosine."""
    start_weight_decay: NonNegativeFloat | None = used_when(None, weight_decay_incr_style=("linear", "cosine"))
    """Weight decay of the first step."""
    end_weight_decay: NonNegativeFloat | None = used_when(None, weight_decay_incr_style=("linear", "cosine"))
    """Weight decay at the end of training."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; 0 does not clip."""


class LRScheduleConfig(Section):
    """Learning rate over time. Internally steps are counted in samples; give iterations or samples."""

    selector: ClassVar[str | None] = "lr_decay_style"

    lr_decay_style: str = "linear"
    """Name of the schedule: constant, linear, cosine, inverse-square-root or WSD."""
    lr_warmup_iters: NonNegativeInt | None = None
    """Steps of linear warm-up. At most one of lr_warmup_iters, lr_warmup_samples, lr_warmup_fraction."""
    lr_warmup_samples: NonNegativeInt | None = None
    """Samples of linear warm-up."""
    lr_warmup_fraction: Probability | None = None
    """Warm-up as a fraction of the decay."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the first step of warm-up."""
    lr_decay_iters: PositiveInt | None = None
    """Steps after which the learning rate is min_lr. Default: the length of training."""
    lr_decay_samples: PositiveInt | None = None
    """The same in samples."""


FP8 = ("e4m3", "hybrid", "e2m1")


class PrecisionConfig(Section):
    """Dtypes and loss scaling."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Weights and activations. bf16 and fp16 keep fp32 master weights and accumulate gradients in fp32."""
    loss_scale: NonNegativeFloat | None = used_when(None, dtype="fp16")
    """A constant loss scale; null scales dynamically."""
    initial_loss_scale: NonNegativeFloat = used_when(2.0**32, dtype="fp16")
    """Dynamic loss scale at the start."""
    min_loss_scale: NonNegativeFloat = used_when(1.0, dtype="fp16")
    """Dynamic loss scale never falls below this."""
    loss_scale_window: PositiveInt = used_when(1000, dtype="fp16")
    """Steps without overflow after which the loss scale doubles."""
    hysteresis: PositiveInt = used_when(2, dtype="fp16")
    """Overflows in a row that are borne before the loss scale halves."""
    accumulate_allreduce_grads_in_fp32: bool = used_when(True, dtype=("bf16", "fp16"))
    """Gradients of micro-batches are added, and summed over processes, in fp32; else in the weights' format."""
    grad_reduce_in_bf16: bool = used_when(False, dtype="bf16")
    """Gradients are sent in bf16."""
    attention_softmax_in_fp32: bool = True
    """The eager attention computes its softmax in fp32."""
    fp8_format: Literal["none", "e4m3", "hybrid", "e2m1"] = "none"
    """The matrix products of layers take their operands in FP8: all in e4m3, or gradients in e5m2 (hybrid); or in 4
    bits (e2m1, with the recipe nvfp4). See docs/guides/fp8.md."""
    fp8_recipe: Literal["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"] = used_when(
        "tensorwise", fp8_format=FP8
    )
    """What shares a scale: a tensor, by its own largest magnitude (tensorwise) or those of past steps (delayed); a row
    (rowwise); 128 numbers of an activation and 128 x 128 of a weight (blockwise); 32 numbers, by a power of two
    (mxfp8); 16 numbers of an activation and 16 x 16 of a weight in 4 bits (nvfp4). See docs/guides/mxfp8-nvfp4.md."""
    fp4_stochastic_rounding: bool = used_when(True, fp8_recipe="nvfp4")
    """Gradients are rounded up or down at random, so that their mean is exact; else to nearest."""
    fp4_hadamard: bool = used_when(True, fp8_recipe="nvfp4")
    """Both operands of a weight's gradient pass a random Hadamard transform of 16 tokens, which spreads outliers."""
    fp4_square_weight_blocks: bool = used_when(True, fp8_recipe="nvfp4")
    """Weights have scales of 16 x 16, and so the same numbers forward and backward; else of 1 x 16."""
    fp8_margin: NonNegativeInt = used_when(0, fp8_format=("e4m3", "hybrid"))
    """Powers of two that scales leave free above the largest magnitude."""
    fp8_amax_history_len: PositiveInt = used_when(1, fp8_recipe="delayed")
    """Steps whose largest magnitudes are kept."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = used_when("most_recent", fp8_recipe="delayed")
    """Scales follow the last step's largest magnitude, or the largest one kept."""
    fp8_wgrad: bool = used_when(True, fp8_format=FP8)
    """Gradients of weights are products in FP8, too; else in the format of the weights."""
    fp8_output_proj: bool = used_when(False, fp8_format=FP8)
    """The output layer is a product in FP8, too."""
    fp8_min_features: PositiveInt | None = used_when(None, fp8_format=FP8)
    """Matrices with fewer input or output features on a process stay in 16 bits. Default: on a GPU 1025, as casts cost
    more than products of 1024 gain; on a CPU 1."""
    fp8_implementation: Literal["auto", "torch", "emulated", "te", "torchao"] = used_when("auto", fp8_format=FP8)
    """What computes the products: torch's scaled_mm, fp32 products of the same numbers (emulated, for tests),
    Transformer Engine or torchao. auto: torch on a GPU, emulated on a CPU."""
    first_last_layers_bf16: bool = used_when(False, fp8_format=FP8)
    """The first and last layers have no FP8 products."""
    num_layers_at_start_in_bf16: NonNegativeInt = used_when(1, first_last_layers_bf16=True)
    """How many first ones."""
    num_layers_at_end_in_bf16: NonNegativeInt = used_when(1, first_last_layers_bf16=True)
    """How many last ones."""


OwnKernel = Literal["auto", "torch", "triton"]


class KernelsConfig(Section):
    """Implementations of the parts of a model that have several; see docs/guides/kernels.md. auto: triton on a GPU
    where it serves, else torch. A named one that cannot serve stops the run."""

    rms_norm: Literal["auto", "torch", "triton", "te", "apex", "liger"] = "auto"
    """RMSNorm."""
    layer_norm: Literal["auto", "torch", "triton", "te", "apex", "liger"] = "auto"
    """LayerNorm."""
    rotary: Literal["auto", "torch", "triton", "apex", "liger"] = "auto"
    """Queries and keys turned by their positions."""
    activation: Literal["auto", "torch", "triton", "te", "liger"] = "auto"
    """SwiGLU, GeGLU and squared ReLU; other activations are torch's."""
    bias_dropout_add: OwnKernel = "auto"
    """Dropout and the sum with the residual stream, in models that have dropout there."""
    cross_entropy: Literal["auto", "torch", "triton", "te", "liger"] = "auto"
    """The loss cross_entropy."""
    linear_cross_entropy: OwnKernel = "auto"
    """The loss linear_cross_entropy."""
    linear_cross_entropy_sum: OwnKernel = "auto"
    """The loss linear_cross_entropy_sum."""
    adamw: OwnKernel = "auto"
    """The optimizer adam; torch with fp32 copies and moments is torch.optim's fused update."""
    fp8_cast: OwnKernel = "auto"
    """Casts of FP8 linear layers. Under train.compile they are torch's."""
    causal_conv: OwnKernel = "auto"
    """Short convolutions of delta nets, Mamba and LFM2 layers, with their activation. auto: torch."""
    index_scores: OwnKernel = "auto"
    """Scores of the indexers of sparse attention and their gradients. auto: on a GPU triton without gradients, else
    torch."""
    hyper_connection: OwnKernel = "auto"
    """Weights, Sinkhorn's iterations and sums of hyper-connections. auto: torch."""


RecomputedModule = Literal["core_attn", "layernorm", "mhc", "mlp", "mla_up_proj", "moe", "moe_act", "shared_experts"]


OffloadedModule = Literal["attn_norm", "attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear"]


class RecomputeConfig(Section):
    """Activations that are computed again in the backward pass, or wait in host memory, instead of being kept."""

    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """`selective` recomputes the modules of recompute_modules, `full` keeps only the inputs of layers."""
    recompute_modules: list[RecomputedModule] = used_when(["core_attn"], recompute_granularity="selective")
    """What `selective` recomputes: scores and softmax of attention, dense feed-forwards, the norms before both,
    queries, keys and values that come from latents, mixtures of experts or parts of them, and hyper-connections (mhc)
    of model.enable_mhc_connections."""
    recompute_method: Literal["block", "uniform"] = used_when("block", recompute_granularity="full")
    """`block` recomputes the first recompute_num_layers layers of each stage one by one; `uniform` keeps one input
    for every recompute_num_layers layers."""
    recompute_num_layers: PositiveInt | None = used_when(None, recompute_granularity="full")
    """Layers of a block (default: all of the stage) or of a uniform group (default: 1)."""
    distribute_saved_activations: bool = used_when(False, recompute_granularity="full")
    """Tensor-parallel processes keep a part each of the inputs that they have in common."""
    cpu_offloading_num_layers: NonNegativeInt = 0
    """The activations of so many first layers of each stage wait in host memory."""
    offload_modules: list[OffloadedModule] = Field(default_factory=list)
    """Modules in all layers whose activations wait in host memory: norms, projections and core of attention, the norm
    before the feed-forward, and of experts their first product and their activation. moe_act and core_attn of
    recompute_modules, too, wait there in place of being computed again."""
    min_offloaded_tensor_size: PositiveInt = 1048576
    """Elements of a tensor below which offload_modules leaves it on the device."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    ckpt_format: str = "mt"
    """Name of the checkpoint saver."""
    save: str | None = None
    """Folder for checkpoints, also of an object store, such as s3://bucket/run (which needs mt-core[remote] and the
    package of the scheme). null: `checkpoints` in the run directory."""
    save_interval: PositiveInt | None = 100
    """Steps between checkpoints; null saves only at the end."""
    save_hf_interval: PositiveInt | None = None
    """Steps between checkpoints that are also written as a Hugging Face folder, `hf/iter_NNNNNNN` beside them, while
    training goes on; the last step's is, too. A multiple of save_interval. null writes none."""
    save_optimizer: bool = True
    """Write the optimizer's state, and the fp32 master weights of 16-bit training, into checkpoints. false: checkpoints
    take a third of the bytes or less, and another run can start from their weights (load), but none resumes."""
    save_frozen: bool = True
    """Write parameters that are not trained into every checkpoint. false: a checkpoint names the one that the run
    started from (load), which has them, and without which it cannot be read."""
    async_save: bool = False
    """Training waits only until a checkpoint is copied to host memory; a thread writes the copy."""
    async_in_flight: PositiveInt = used_when(1, async_save=True)
    """Checkpoints of async_save that may be copied and not yet written, each of which takes host memory."""
    keep_last: PositiveInt | None = None
    """Checkpoints that are kept, the newest ones; older ones are removed after a save. null keeps all."""
    keep_every: PositiveInt | None = None
    """Beside keep_last: checkpoints of iterations that this divides are kept, too."""
    best_metric: str | None = None
    """A value of the evaluations, such as matched_accuracy or valid_loss; a metric alone is that of all validation sets
    together. The checkpoint of its best evaluation (a loss: the lowest; else the highest) is kept as `RUN/best`."""
    resume: Literal["auto", "never", "required"] = "auto"
    """`auto` goes on from the run directory's latest checkpoint if it has one; `required` is an error
    without one; `never` refuses a run directory that already holds checkpoints."""
    resume_from: str | None = None
    """Another run (or a checkpoint of one) to go on from with all of its state, unless the run directory already has a
    checkpoint of its own."""
    ckpt_step: PositiveInt | None = None
    """Go on from the checkpoint of this step instead of the latest. Later ones are left alone until they are written
    anew."""
    load: str | None = None
    """Start from the weights of this checkpoint (a run directory or a checkpoint) with a new optimizer,
    unless the run directory already has a checkpoint of its own."""
    load_parts: dict[str, str] | None = None
    """In place of `load`: a part of the model -> the checkpoint whose weights and [model] section it has, such as
    {vision_model = "clip-vit-large-patch14-336", language_model = "vicuna-7b-v1.5"}."""
    load_missing: list[str] = Field(default_factory=list)
    """Parameters that `load` or `load_parts` need not have, and which then keep their initial values, such as
    "classification_head.*" (* stands for anything)."""
    load_ignored: list[str] = Field(default_factory=list)
    """Tensors of `load` or `load_parts` that are left out, such as "lm_head.*"."""
    accept_changes: list[str] = Field(default_factory=list)
    """Keys that may differ from the ones the resumed checkpoint was made with."""
    resume_loss_check: Literal["error", "warn"] = "error"
    """What follows when the loss of the first resumed step is far from the losses before the checkpoint."""

    @property
    def start(self) -> str | dict[str, str] | None:
        """What a new run starts from: load, or load_parts."""
        return self.load if self.load_parts is None else self.load_parts


class LoggingConfig(Section):
    """What is shown and written."""

    log_interval: PositiveInt = 10
    """Steps between lines of log and metrics."""
    trace_schedule: str | None = None
    """File (.json or .svg) for what ran when on each pipeline stage, of the second step."""
    log_num_zeros_in_grad: bool = False
    """Count the elements of the gradient that are 0."""
    log_params_norm: bool = False
    """Record the 2-norm of all trained parameters, at each line of log and metrics."""
    log_format: Literal["mt", "megatron"] = "mt"
    """Form of the lines about steps and evaluations; `megatron` is that of Megatron-LM, for programs that read it."""
    device_peak_tflops: PositiveFloat | None = None
    """TFLOP/s of a device, of which MFU is the fraction that training reaches. Default: the dense bf16 peak, of known
    GPUs."""
    status_interval: PositiveFloat | None = None
    """Seconds between writes of status/rank-N.json in the run directory, which `mt watch` reads. Default: 1, and longer
    from 64 ranks on."""
    failures_per_node_day: PositiveFloat = 0.0038
    """Failures of a machine per day, from which the last lines of the log suggest the time between checkpoints. The
    default is that of Llama 3's training (419 failures on 2,048 nodes in 54 days)."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """`live` draws a progress line, `plain` prints a line each log_interval; `auto` depends on the terminal."""
    trackers: list[str] = Field(default_factory=list)
    """Trackers that get the metrics, by the names of their callbacks (mt-ops brings some; each has a section of its
    name). One that fails while training goes on is reported once; see docs/guides/logging.md."""
    tensorboard_log_interval: PositiveInt = 1
    """Steps between points, of all trackers (as in Megatron)."""


class NumericsConfig(Section):
    """Results that do not depend on how they are computed, to the last bit."""

    batch_invariant: bool = False
    """Results of a sequence do not depend on what shares its batch: what is generated has the log-probabilities that
    training's forward pass computes under the same key. Slower."""


class TimeoutsConfig(Section):
    """Seconds that a rank may be in a phase; then the run ends with the name of the rank that is late."""

    init: PositiveFloat = 600.0
    """Until every rank has arrived and the process groups stand."""
    data: PositiveFloat = 1800.0
    """Building data sets."""
    load: PositiveFloat = 3600.0
    """Reading a checkpoint."""
    step: PositiveFloat = 1800.0
    """One step of training, waiting for its batch included."""
    evaluate: PositiveFloat = 3600.0
    """All of an evaluation."""
    save: PositiveFloat = 3600.0
    """Saving a checkpoint, as long as training waits for it."""


SectionT = TypeVar("SectionT", bound=Section)


class Config(Section):
    """The whole configuration. Sections hold the types of the plugins that they name; those that distributions bring
    (`mt_register_sections`) are read by `section`."""

    model: SerializeAsAny[ModelConfig]
    tokenizer: SerializeAsAny[TokenizerConfig]
    data: SerializeAsAny[DataConfig]
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: SerializeAsAny[OptimizerConfig]
    lr_schedule: SerializeAsAny[LRScheduleConfig]
    precision: PrecisionConfig
    numerics: NumericsConfig
    kernels: KernelsConfig
    recompute: RecomputeConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    timeouts: TimeoutsConfig
    brought: dict[str, SerializeAsAny[Section]] = Field(default_factory=dict)
    """Name -> section, of those that distributions bring."""
    foreign: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Sections of a stored configuration whose distributions are not installed, as they are."""

    def section(self, type_: type[SectionT]) -> SectionT:
        """The section of a type that a distribution brings; with its defaults where that one's plugin is not loaded."""
        return next((section for section in self.brought.values() if isinstance(section, type_)), None) or type_()

    def with_section(self, name: str, section: Section) -> Config:
        """With another section that a distribution brings."""
        return self.model_copy(update={"brought": {**self.brought, name: section}})

    def named(self, name: str) -> Section:
        """A section by its name. Raises KeyError for one that is not there."""
        section = self.brought[name] if name in self.brought else getattr(self, name)
        assert isinstance(section, Section)
        return section

    def to_dict(self) -> dict[str, Any]:
        """Section -> key -> plain JSON and TOML value, every key present (None included)."""
        tree = self.model_dump(mode="json")
        foreign, brought = tree.pop("foreign"), tree.pop("brought")
        return {**tree, **brought, **foreign}


CORE_SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelConfig,
    "tokenizer": TokenizerConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "lr_schedule": LRScheduleConfig,
    "precision": PrecisionConfig,
    "numerics": NumericsConfig,
    "kernels": KernelsConfig,
    "recompute": RecomputeConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "timeouts": TimeoutsConfig,
}
"""The sections of mt-core. Those of all installed distributions: `mt_core.config.sections.section_types`."""

REGISTRY_OF_SECTION: Mapping[str, str] = {
    "model": "models",
    "tokenizer": "tokenizers",
    "data": "datasets",
    "optimizer": "optimizers",
    "lr_schedule": "lr_schedules",
}
"""Sections whose type is chosen by a registered name, and the kind of registry that holds it."""

"""Ways of breaking mt that nobody may notice at once: a change of the source, and the tests that have to fail.

`before` has to occur exactly once in the file, which is a path below packages/; test_catalogue.py checks it.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT = "tests/dist/test_layouts.py::test_a_layout_computes_what_one_process_computes"
TP2 = f"{LAYOUT}[2-tensor_model_size=2]"
TP2_SP = f"{LAYOUT}[2-tensor_model_size=2+sequence_parallel=true]"
CP2 = f"{LAYOUT}[2-context_size=2]"
PP2 = f"{LAYOUT}[2-pipeline_model_size=2]"
ZERO = f"{LAYOUT}[2-use_distributed_optimizer=true]"
FORMULAS = "tests/dist/test_steps_by_formula.py"
DROPOUT = "tests/core/nn/test_dropout.py"
PLAIN_STEP = "tests/core/train/test_optimizer_step.py"
RESUME = "tests/core/train/test_resume.py"
MOE_LAYOUTS = "tests/moe/test_layouts.py::test_every_layout_computes_what_one_process_does[{}]"

CORE, DATA = "mt-core/src/mt_core", "mt-data/src/mt_data/datasets"
MOE, MODELS, CKPT = "mt-moe/src/mt_moe", "mt-models/src/mt_models", "mt-ckpt/src/mt_ckpt"
INFER = "mt-infer/src/mt_infer"


@dataclass(frozen=True)
class Mutation:
    """tests: arguments of pytest; the fewest tests that should notice."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


LAYOUTS = (
    Mutation(
        "an all-reduce of tensor parallelism is dropped",
        f"{CORE}/parallel/collectives.py",
        "Axis) -> Tensor:\n        return all_reduce(x, axis)\n\n    @staticmethod",
        "Axis) -> Tensor:\n        return x.clone()\n\n    @staticmethod",
        (TP2,),
    ),
    Mutation(
        "gradients of a column-parallel layer's input are not summed",
        f"{CORE}/nn/linear.py",
        "dx, reducing = start_sum(_input_gradient(grad, weight), axis, ctx.sequence_parallel)",
        "dx, reducing = (_input_gradient(grad, weight), None) if not ctx.sequence_parallel "
        "else start_sum(_input_gradient(grad, weight), axis, True)",
        (TP2,),
    ),
    Mutation(
        "partial gradients are not summed",
        f"{CORE}/optim/finalize_grads.py",
        "for axis, parts in partial.items():",
        "for axis, parts in list(partial.items())[:0]:",
        (TP2_SP,),
    ),
    Mutation(
        "gradients of tied weights are not summed",
        f"{CORE}/optim/finalize_grads.py",
        "if shared in gradients:",
        "if False:",
        (PP2,),
    ),
    Mutation(
        "the norm counts copies twice",
        f"{CORE}/optim/finalize_grads.py",
        "counted = [tensor for name, tensor in named if self.counts(name)]",
        "counted = [tensor for name, tensor in named]",
        (TP2,),
    ),
    Mutation(
        "a rank of context parallelism takes consecutive positions",
        f"{CORE}/nn/context_parallel/zigzag.py",
        "return torch.cat([chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]], dim)",
        "return torch.cat([chunks[2 * axis.rank], chunks[2 * axis.rank + 1]], dim)",
        (CP2,),
    ),
    Mutation(
        "gradients are not summed over samples",
        f"{CORE}/optim/buckets.py",
        "if shard.size == 1 and self.axes.replicate.size == 1:\n            return",
        "if True:\n            return",
        ("tests/dist/test_data_parallel.py::test_ranks_together_train_as_one_process[2]",),
    ),
    Mutation(
        "updated weights are not collected",
        f"{CORE}/optim/buckets.py",
        "part = self.part(self.weights)\n",
        "return\n",
        (ZERO,),
    ),
    Mutation(
        "layers do not wait for the weights that are on the way",
        f"{CORE}/optim/buckets.py",
        "for bucket in buckets:\n            bucket.finish_gather()",
        "for bucket in buckets:\n            pass",
        (FORMULAS, "-k", "arrive"),
    ),
    Mutation(
        "nothing waits for the weights that are on the way",
        f"{CORE}/optim/buckets.py",
        "self._gathering.wait()\n            self._gathering = None",
        "self._gathering = None",
        (FORMULAS, "-k", "arrive"),
    ),
    Mutation(
        "the number of micro-batches is that of the first step",
        f"{CORE}/optim/param_and_grad_buffer.py",
        "self._passes, self._next_bucket = passes, 0",
        "passes = self._passes or passes\n        self._passes, self._next_bucket = passes, 0",
        (FORMULAS, "-k", "growing"),
    ),
    Mutation(
        "a stage runs its first micro-batch only",
        f"{CORE}/parallel/pipeline/schedule_run.py",
        "batch, hidden = self.micro_batches[action.micro_batch], self._input(place)",
        "batch, hidden = self.micro_batches[0], self._input(place)",
        (PP2,),
    ),
    Mutation(
        "rows of FSDP's shards are counted from the floor of an uneven division",
        f"{CORE}/optim/fully_sharded_weights.py",
        "first = min(-(-whole.shape[0] // ranks) * number, whole.shape[0])",
        "first = min(whole.shape[0] // ranks * number, whole.shape[0])",
        ("tests/core/optim/test_fully_sharded_rows.py",),
    ),
    Mutation(
        "an evaluation does not wait for the weights that are on the way",
        f"{CORE}/train/engine.py",
        'same samples every time."""\n        self.weights.finish_gather()\n',
        'same samples every time."""\n',
        (FORMULAS, "-k", "evaluation_waits"),
    ),
    Mutation(
        "gradients of keys are summed in 16 bits over a ring",
        f"{CORE}/nn/context_parallel/p2p.py",
        "dkv = circulate(queries, kv, Rounds(ctx.pattern), lse.dtype)",
        "dkv = circulate(queries, kv, Rounds(ctx.pattern), kv.dtype)",
        ("tests/dist/test_context_parallel.py", "-k", "summed_in_fp32"),
    ),
    Mutation(
        "tensor-parallel ranks drop equal attention weights",
        f"{CORE}/nn/dropout.py",
        'self.streams.begin(f"{self.site} of tensor-parallel rank {self.ctx.tp.rank}")',
        "self.streams.begin(self.site)",
        (DROPOUT, "-k", "other_heads"),
    ),
)

STEPS = (
    Mutation(
        "the seed of the run does not reach dropout",
        f"{CORE}/train/engine.py",
        "use_streams(model, DropoutStreams(config.train.seed))",
        "use_streams(model, DropoutStreams(1234))",
        (DROPOUT, "-k", "seed"),
    ),
    Mutation(
        "auxiliary gradients are not scaled with the loss",
        f"{CORE}/train/step/optimizer_step.py",
        "self.auxiliary.begin(passes, self.scaler.scale)",
        "self.auxiliary.begin(passes)",
        (PLAIN_STEP, "-k", "auxiliary"),
    ),
    Mutation(
        "auxiliary losses are those of one rank",
        f"{CORE}/train/step/optimizer_step.py",
        "sum_on_device(means / self.ctx.dp.size, self.ctx.dp)",
        "means",
        ("tests/core/train/test_auxiliary_means.py",),
    ),
    Mutation(
        "gradients are divided by the loss scale of the next step",
        f"{CORE}/train/step/optimizer_step.py",
        "self._scale_gradients(clip_factor(outcome.grad_norm, self.clip_grad) / scale)",
        "self._scale_gradients(clip_factor(outcome.grad_norm, self.clip_grad) / self.scaler.scale)",
        (PLAIN_STEP, "-k", "scale_grows"),
    ),
    Mutation(
        "overflows before a checkpoint are forgotten on resume",
        f"{CORE}/optim/loss_scale.py",
        'self.patience = int(state["patience"])',
        "self.patience = self.hysteresis",
        ("tests/core/optim/test_loss_scale.py", "-k", "resumed"),
    ),
    Mutation(
        "the warm-up is a fraction of training and not of the decay",
        f"{CORE}/optim/schedules.py",
        "warmup = int(config.lr_warmup_fraction * decay)",
        "warmup = int(config.lr_warmup_fraction * horizon.total_samples)",
        ("tests/core/optim/test_lr_schedules.py", "-k", "fraction"),
    ),
    Mutation(
        "ranks compare nothing before their groups are made",
        f"{CORE}/train/engine.py",
        "        require_same_program(config, tokenizer, host)\n",
        "",
        ("tests/core/train/test_same_start.py", "-k", "names_what_differs and seed"),
    ),
    Mutation(
        "containers of one host name are taken for one",
        f"{CORE}/train/same_start.py",
        "[*file_system(), _script(), ",
        "[socket.gethostname(), _script(), ",
        ("tests/core/train/test_same_start.py", "-m", "", "-k", "containers"),
    ),
    Mutation(
        "hybrids have no more tensor-parallel ranks than groups",
        "mt-models/src/mt_models/hybrid/config.py",
        ", heads=model.num_attention_heads",
        "",
        ("tests/models/test_hybrid.py", "-k", "multiple_of_the_groups"),
    ),
    Mutation(
        "gradients are not zeroed after the third step",
        f"{CORE}/train/step/optimizer_step.py",
        "self.weights.zero_grad()\n",
        "self.taken = getattr(self, 'taken', 0) + 1\n"
        "        if self.taken <= 3:\n            self.weights.zero_grad()\n",
        (PLAIN_STEP, "-k", "six"),
    ),
    Mutation(
        "the loss is a mean of the micro-batches' means",
        f"{CORE}/train/step/optimizer_step.py",
        "part = divided(weighted_sum(losses, batch[WEIGHTS]), divisor)",
        "part = weighted_sum(losses, batch[WEIGHTS]) / batch[WEIGHTS].sum() / self._passes / self.ctx.dp_cp.size",
        (FORMULAS, "-k", "weighs and never"),
    ),
    Mutation(
        "a rank divides by its own count of tokens",
        f"{CORE}/train/step/optimizer_step.py",
        "return divisor, tokens\n",
        "return counts.divisor * self.ctx.dp.size, tokens\n",
        (FORMULAS, "-k", "weighs and 2-never"),
    ),
    Mutation(
        "the loss of an evaluation is not summed over ranks",
        f"{CORE}/train/predictions.py",
        "(whole,) = sum_over([total], ctx.dp_cp, ctx.device)",
        "whole, divisor = total, divisor / ctx.dp.size",
        (FORMULAS, "-k", "weighs and 2-never"),
    ),
    Mutation(
        "weights of positions only leave positions out",
        f"{CORE}/nn/loss.py",
        "return (losses.masked_fill(weights == 0, 0.0) * weights).sum()",
        "return losses.masked_fill(weights == 0, 0.0).sum()",
        (FORMULAS, "-k", "weights_of_positions"),
    ),
    Mutation(
        "the fused loss takes the mean of the gradients of weighted losses",
        f"{CORE}/nn/loss.py",
        "grads[0].take(largest) / weights.take(largest).clamp(min=torch.finfo(weights.dtype).tiny)",
        "(grads[0] * weights).sum() / weights.sum().clamp(min=1.0)",
        (FORMULAS, "-k", "weights_of_positions"),
    ),
    Mutation(
        "all samples drop alike",
        f"{CORE}/nn/dropout.py",
        "at sample {SAMPLE.get()}",
        "at sample 0",
        (FORMULAS, "-k", "drops"),
    ),
    Mutation(
        "gradients are clipped without their scale",
        f"{CORE}/train/step/optimizer_step.py",
        "self._scale_gradients(clip_factor(outcome.grad_norm, self.clip_grad) / scale)",
        "self._scale_gradients(clip_factor(outcome.grad_norm, self.clip_grad))",
        (PLAIN_STEP, "-k", "scale_cancels"),
    ),
    Mutation(
        "each step is clipped by a tenth",
        f"{CORE}/train/step/optimizer_step.py",
        "return min(limit / (norm + 1e-6), 1.0)",
        "return 0.9 * min(limit / (norm + 1e-6), 1.0)",
        (PLAIN_STEP, "-k", "clip"),
    ),
    Mutation(
        "biases and norms decay",
        f"{CORE}/optim/param_groups.py",
        'return len(shape) > 1 and not name.endswith("bias")',
        "return True",
        (PLAIN_STEP, "-k", "decay"),
    ),
    Mutation(
        "a norm's epsilon is ten times what was asked for",
        f"{CORE}/nn/norm.py",
        "return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)",
        "return F.rms_norm(x.float(), weight.shape, weight.float(), 10 * eps).to(x.dtype)",
        ("tests/models/test_llama.py", "-k", "choice_of_shape"),
    ),
)

DATA_ORDER = (
    Mutation(
        "samples that only fill a round count in an evaluation",
        f"{CORE}/data/loader.py",
        'return {**arrays, "loss_mask": np.zeros_like(arrays.get("loss_mask", np.ones(1, dtype=np.float32)))}',
        "return arrays",
        ("tests/core/data/test_loader.py", "-k", "counts_once"),
    ),
    Mutation(
        "the validation part of one long document begins with the training part's tokens",
        f"{DATA}/splits.py",
        "skipped = self._skipped if index == self.elements.start else 0",
        "skipped = 0",
        ("tests/data/datasets/test_own_text.py", "-k", "partition or one_long_document"),
    ),
    Mutation(
        "all ranks take the same samples",
        f"{CORE}/data/loader.py",
        "starts = range(first + dp_rank * micro_size, first + size, dp_size * micro_size)",
        "starts = range(first, first + size, dp_size * micro_size)",
        ("tests/core/data/test_loader.py",),
    ),
    Mutation(
        "a shuffle throws words of the next mask away",
        f"{DATA}/mersenne_twister.py",
        "if len(targets) >= wanted:",
        "if len(targets) > wanted:",
        ("tests/data/datasets/test_gpt_index.py", "-k", "words_behind"),
    ),
    Mutation(
        "the last epoch is not shuffled apart",
        f"{DATA}/gpt_index.py",
        "random.shuffle(order[:before])\n        random.shuffle(order[before:])",
        "random.shuffle(order)",
        ("tests/data/datasets/test_gpt_index.py",),
    ),
    Mutation(
        "the loss counts at the end of a document, and not at the token before",
        f"{DATA}/samples.py",
        "loss_mask[tokens == rules.eod] = 0.0",
        "loss_mask[labels == rules.eod] = 0.0",
        ("tests/data/datasets/test_gpt_dataset.py", "-k", "masks_at_documents"),
    ),
    Mutation(
        "padding counts in the loss",
        f"{DATA}/samples.py",
        "loss_mask[labels == rules.pad] = 0.0\n",
        "",
        ("tests/data/datasets/test_gpt_dataset.py", "-k", "padd"),
    ),
)

RESUMING = (
    Mutation(
        "a resumed run draws other random numbers",
        f"{CORE}/train/checkpoint/state.py",
        'torch.set_rng_state(reader.read(f"{RNG}cpu.{rank}"))',
        "pass",
        (RESUME,),
    ),
    Mutation(
        "a resumed run begins with the first samples",
        f"{CORE}/train/trainer.py",
        "self.checkpointed().restore(reader)\n",
        "self.checkpointed().restore(reader)\n        self.state.consumed_samples = 0\n",
        (RESUME, "-k", "samples_go_on"),
    ),
)

EXPERTS = (
    Mutation(
        "ranks of dense tensor parallelism share the experts' matrices in Muon",
        f"{CORE}/optim/muon.py",
        'return Team(ctx.axis("etp"), ctx.axis("edp"))',
        'return Team(ctx.tp, ctx.axis("edp"))',
        ("tests/dist/test_muon.py", "-k", "same_steps and expert_model"),
    ),
    Mutation(
        "gradients of experts are summed over the dense group",
        f"{CORE}/optim/finalize_grads.py",
        '"edp": ("expert_shard", "expert_replicate"),',
        '"edp": ("shard", "replicate"),',
        ("tests/dist/test_layouts.py", "-k", "expert_model_size and use_distributed and not tensor and not pipeline"),
    ),
    Mutation(
        "the balance loss is scaled by tp",
        f"{MOE}/routing/balance.py",
        "return balance(sums, counts, scored.share.total, scored.choices.shape[1])",
        "return balance(sums, counts, scored.share.total, scored.choices.shape[1]) * (2 if scored.share.axes else 1)",
        (MOE_LAYOUTS.format(2),),
    ),
    Mutation(
        "the expert bias moves by the load of one rank",
        f"{MOE}/routing/balance.py",
        "for axis in (self.ctx.tp, self.ctx.dp_cp):",
        "for axis in ():",
        (MOE_LAYOUTS.format(2),),
    ),
    Mutation(
        "results of experts are not summed over etp",
        f"{MOE}/dispatchers/alltoall.py",
        "rows = sum_rows_to(expert_output, self.placement.etp, state.sizes.shared)",
        "rows = expert_output.split(list(state.sizes.shared))[self.placement.etp.rank]",
        (MOE_LAYOUTS.format(2),),
    ),
    Mutation(
        "weights of chosen experts are not divided by their sum",
        f"{MOE}/routing/selection.py",
        "return (chosen - log_sum.logaddexp(torch.full_like(log_sum, math.log(epsilon)))).exp()",
        "return chosen.exp()",
        ("tests/moe/test_routing.py", "-k", "weights_are"),
    ),
    Mutation(
        "the expert bias has no part in the choice",
        f"{MOE}/routing/selection.py",
        "if bias is not None:\n",
        "if False:\n",
        ("tests/moe/test_routing.py", "-k", "expert_bias"),
    ),
)

CONVERSION = (
    Mutation(
        "the older of two tables of rotary positions is dropped",
        f"{MODELS}/blocks/hugging_face_decoder.py",
        "for key in _TABLES if external.get(key)}\n",
        "for key in _TABLES[:1] if external.get(key)}\n",
        ("tests/ckpt/test_config_sweep.py", "-k", "telling and llama"),
    ),
    Mutation(
        "T5's activation is read from the older field alone",
        f"{MODELS}/t5/hugging_face.py",
        'external.get("dense_act_fn", implied)',
        "implied",
        ("tests/ckpt/test_config_sweep.py", "-k", "telling and t5"),
    ),
    Mutation(
        "an empty table of rotary positions is taken for none",
        f"{MODELS}/gpt_oss/hugging_face.py",
        'external.get("rope_parameters") is not None or',
        'external.get("rope_parameters") or',
        ("tests/ckpt/test_config_sweep.py", "-k", "telling and gpt_oss"),
    ),
    Mutation(
        "gate and up change places",
        f"{MODELS}/blocks/hugging_face_decoder.py",
        'halves = (f"{THEIRS}mlp.gate_proj.{kind}", f"{THEIRS}mlp.up_proj.{kind}")',
        'halves = (f"{THEIRS}mlp.up_proj.{kind}", f"{THEIRS}mlp.gate_proj.{kind}")',
        ("tests/models/test_llama.py", "-k", "choice_of_shape"),
    ),
    Mutation(
        "key and value change places",
        f"{MODELS}/blocks/hugging_face_decoder.py",
        'for name in "qkv"),\n',
        'for name in "qvk"),\n',
        ("tests/models/test_llama.py", "-k", "choice_of_shape"),
    ),
    Mutation(
        "Megatron's cut of a multi-token projection is forgotten",
        f"{CKPT}/megatron/model.py",
        "return {name: by_rows(layout) if name.endswith(cut) else layout for name, layout in layouts.items()}",
        "return dict(layouts)",
        ("tests/ckpt/megatron/test_families.py",),
    ),
    Mutation(
        "bytes of an export are not checked",
        f"{CKPT}/files/checksum_file.py",
        "            if actual != expected:\n",
        "            if False:\n",
        ("tests/ckpt/test_ckpt_checksums.py", "-k", "changed_file_is_refused"),
    ),
)

SAMPLING = (
    Mutation(
        "drafts are accepted unverified",
        f"{INFER}/speculation/drafter.py",
        "while count < len(drafts) and sampled[count].token == drafts[count]:",
        "while count < len(drafts):",
        ("tests/infer/test_speculation.py::test_tokens_with_ngrams[gpt2]",),
    ),
    Mutation(
        "recurrent states keep rejected drafts",
        f"{INFER}/cache/manager.py",
        "self.states.restore(sequence.slot, snapshot)\n\n    def release",
        "pass\n\n    def release",
        ("tests/infer/test_speculation.py::test_tokens_with_ngrams[bamba]",),
    ),
    Mutation(
        "the last block of a forked beam is not copied",
        f"{INFER}/cache/manager.py",
        "storage.copy_block(*copied)",
        "pass",
        ("tests/infer/test_generation_reference.py::test_beams[llama]",),
    ),
    Mutation(
        "a draft reads the penalties of the text before it",
        f"{INFER}/sampling/rows.py",
        "return [*self.sequence.tokens, *self.drafted] if self.drafted else self.sequence.tokens",
        "return self.sequence.tokens",
        ("tests/infer/test_speculation.py::test_accepted_drafts_count_for_penalties",),
    ),
    Mutation(
        "beams are ended by a worse running beam than the best",
        f"{INFER}/sampling/beam_search.py",
        "best_possible = self.scores[0]",
        "best_possible = self.scores[-1]",
        ("tests/infer/test_beam_search.py",),
    ),
)

IMPORTS = (
    Mutation(
        "weights of norms that are stored less one are read as they are",
        f"{CORE}/name_map.py",
        "return tensors[0].float() + 1.0",
        "return tensors[0].float()",
        ("tests/models/test_gpt_hf.py::test_logits_and_gradients_equal_the_reference[Nemotron-eager]",),
    ),
    Mutation(
        "a run goes on after its minutes",
        f"{CORE}/train/trainer.py",
        "if minutes is not None and time.monotonic() - began > 60.0 * minutes:",
        "if False:",
        (f"{RESUME}::test_a_run_ends_after_its_minutes_with_a_checkpoint",),
    ),
    Mutation(
        "the newest checkpoint is imported in place of the iteration that is named",
        "mt-import/src/mt_import/megatron_arguments/sections.py",
        "return load if load is None or iteration is None else",
        "return load if True else",
        ("tests/import_/test_arguments_table.py::test_an_iteration_of_a_checkpoint_is_loaded",),
    ),
)

EVALUATION = (
    Mutation(
        "a product is tried for batch invariance with the factor that comes first",
        f"{CORE}/nn/batch_invariance.py",
        "full = _random_like(b)",
        "full = b",
        ("tests/infer/test_batch_invariance.py::test_a_verdict_does_not_depend_on_the_factor_that_asks_for_it",),
    ),
    Mutation(
        "images of 16 bits are clipped",
        f"{DATA}/images/pixels.py",
        "image = _eight_bits(image, name).convert",
        "image = image.convert",
        ("tests/data/images/test_images.py::test_whole_numbers_of_more_bits_are_scaled",),
    ),
    Mutation(
        "a program passes by its exit status",
        "mt-core/src/mt_core/sandbox/programs.py",
        "return os.read(end_reader, 2 * len(secret)) == secret, status",
        "return os.read(end, 2 * len(secret)) == secret or status == 97, status",
        ("tests/eval/test_generation_metrics.py::test_programs_fail_that_do_not_reach_their_end",),
    ),
)

MUTATIONS = (*LAYOUTS, *STEPS, *DATA_ORDER, *RESUMING, *EXPERTS, *CONVERSION, *SAMPLING, *IMPORTS, *EVALUATION)

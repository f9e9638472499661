"""Kernels in a whole run: what the section `kernels` chooses is what computes, and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.loss import Unprojected
from mt_core.train import Callback, Trainer, engine
from mt_core.train.checkpoint.state import OPTIMIZER
from mt_models.gpt.model import GPTModel

BF16 = ["precision.dtype=bf16", "precision.accumulate_allreduce_grads_in_fp32=false"]


class Seen(Callback):
    """Losses of steps, and messages."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.messages: list[str] = []

    def on_step_end(self, run, metrics) -> None:
        self.losses.append(metrics["loss"])

    def on_message(self, run, message) -> None:
        self.messages.append(message)


def run(config, **parts) -> Seen:
    seen = Seen()
    Trainer(config, callbacks=[seen], **parts).train()
    return seen


@pytest.mark.slow
def test_naming_torch_changes_nothing_but_what_is_said(tiny) -> None:
    named = ["kernels.rms_norm=torch", "kernels.cross_entropy=torch", "kernels.adamw=torch"]
    plain, chosen = run(tiny()), run(tiny(*named))
    assert chosen.losses == plain.losses
    assert not [message for message in plain.messages if message.startswith("kernel ")]
    assert [message for message in chosen.messages if "rms_norm: torch (as kernels.rms_norm says" in message]


class Noted(Kernels):
    """Gives every kernel's reference, as if it were another implementation than torch's, and notes each call."""

    def __init__(self) -> None:
        super().__init__({}, "cpu", "float32")
        self.called: set[str] = set()

    def pick(self, kernel, *features, width=0, plain=None) -> Callable[..., object]:
        function = super().pick(kernel, *features, width=width)

        def call(*arguments, **named):
            self.called.add(kernel)
            return function(*arguments, **named)

        return call


VARIANTS = {
    "rotary, SwiGLU": ([], {"rms_norm", "rotary", "activation", "cross_entropy", "adamw"}),
    "partly rotary, dropout": (
        ["model.rotary_percent=0.5", "model.hidden_dropout=0.1"],
        {"rms_norm", "rotary", "activation", "cross_entropy", "adamw", "bias_dropout_add"},
    ),
    "LayerNorm, GELU": (
        ["model.normalization=LayerNorm", "model.activation=gelu"],
        {"layer_norm", "rotary", "cross_entropy", "adamw"},
    ),
    "without logits": (
        ["train.loss=linear_cross_entropy"],
        {"rms_norm", "rotary", "activation", "linear_cross_entropy", "adamw"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_modules_loss_and_optimizer_use_the_kernels_they_are_given(variant, tiny, monkeypatch) -> None:
    overrides, used = VARIANTS[variant]
    config = tiny("train.train_iters=3", *overrides)
    plain, kernels = run(config), Noted()
    monkeypatch.setattr(engine, "configured_kernels", lambda config, ctx: kernels)
    assert run(config).losses == pytest.approx(plain.losses, rel=1e-5)
    assert kernels.called == used


def test_an_implementation_that_cannot_serve_stops_the_run(tiny) -> None:
    with pytest.raises(ConfigError, match=r"kernels.rms_norm=te cannot serve .*not installed; use auto or torch"):
        Trainer(tiny("kernels.rms_norm=te"))


def test_a_kernel_that_nothing_uses_is_refused(tiny) -> None:
    with pytest.raises(ConfigError, match=r"kernels.layer_norm=torch: nothing in this run uses that kernel"):
        Trainer(tiny("kernels.layer_norm=torch"))


def test_an_unknown_implementation_names_the_known_ones(tiny) -> None:
    with pytest.raises(ConfigError, match=r"kernels.rotary.*'auto', 'torch', 'triton', 'apex' or 'liger'"):
        tiny("kernels.rotary=te")


# -- the loss without logits --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["linear_cross_entropy", "linear_cross_entropy_sum"])
@pytest.mark.parametrize("untied", ["true", "false"])
def test_the_loss_without_logits_trains_alike(loss, untied, tiny) -> None:
    model = f"model.untie_embeddings_and_output_weights={untied}"
    plain = run(tiny(model, "data.eod_mask_loss=true"))
    fused = run(tiny(model, "data.eod_mask_loss=true", f"train.loss={loss}"))
    assert fused.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.slow
def test_padding_of_the_vocabulary_that_is_multiplied_changes_no_loss(tiny, monkeypatch) -> None:
    """As on a GPU."""
    config = tiny("train.loss=linear_cross_entropy_sum", "train.train_iters=3")
    without = run(config)
    multiplied = []

    def matrix(self: Unprojected) -> torch.Tensor:
        multiplied.append((len(self.own), len(self.weight)))
        return self.weight

    monkeypatch.setattr(Unprojected, "matrix", matrix)
    assert run(config).losses == pytest.approx(without.losses, rel=1e-6)
    assert {ids < rows for ids, rows in multiplied} == {True}


def test_no_logits_are_made(tiny, monkeypatch) -> None:
    """Neither the model's output nor any tensor kept for the backward pass has a column for each id of a whole
    micro-batch."""
    from mt_core.nn.kernels import chunked_loss

    monkeypatch.setattr(chunked_loss, "rows_of_chunk", lambda hidden, weight: 8)
    config = tiny("train.loss=linear_cross_entropy", "train.train_iters=1", "lr_schedule.lr_warmup_iters=0")
    trainer = Trainer(config)
    vocabulary, positions = config.config.model.vocab_size or trainer.engine.tokenizer.vocab_size, 2 * 16
    largest = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] == vocabulary:
            largest.append(x.numel() // vocabulary)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer.train()
    assert max(largest, default=0) < positions


GEMMA = [
    "model.family=gemma",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.ffn_hidden_size=32",
    "model.num_attention_heads=4",
    "model.final_logit_softcapping=30.0",
    "data.seq_length=16",
    "train.train_iters=1",
    "train.loss=linear_cross_entropy",
]


def test_a_model_that_bends_its_logits_refuses(host) -> None:
    with pytest.raises(ConfigError, match=r"train.loss=linear_cross_entropy .*final_logit_softcapping=30.0 bends"):
        Trainer(load_config(overrides=GEMMA, host=host))


# -- fewer bytes in the optimizer ---------------------------------------------------------------------


@pytest.mark.slow
def test_remainders_are_fp32_training_in_another_place(tiny) -> None:
    """bf16 weights with remainders follow bf16 weights with fp32 copies, and not bf16 weights alone."""
    copies = run(tiny("precision.dtype=bf16", "train.global_batch_size=2", "train.train_iters=12"))
    split = run(tiny(*BF16, "optimizer.main_weights=remainders", "train.global_batch_size=2", "train.train_iters=12"))
    assert split.losses == pytest.approx(copies.losses, rel=2e-3)


def test_remainders_with_gradients_in_fp32_are_fp32_copies(tiny, tmp_path) -> None:
    """After a step of two micro-batches, but for the last bit, as torch's AdamW updates the copies. Later the model's
    weights may differ where rounding to bf16 is a tie."""

    def step(*overrides: str) -> Trainer:
        settings = [*BF16[:1], "train.global_batch_size=4", "train.train_iters=3", "train.exit_iteration=1"]
        # The first step moves weights by their gradients: no warm-up, and an eps far above the second moment.
        linear = ["lr_schedule.lr_warmup_iters=0", "optimizer.lr=1.0", "optimizer.adam_eps=1.0"]
        trainer = Trainer(tiny(*settings, *linear, *overrides))
        trainer.train()
        return trainer

    copies, split = step(), step("optimizer.main_weights=remainders")
    expected = dict(copies.engine.weights.named_parameters())
    found = dict(split.engine.weights.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.data_ptr() == split.model.get_parameter(name).data_ptr()
        torch.testing.assert_close(
            split.engine.optimizer.main(parameter), expected[name].detach(), rtol=1e-6, atol=1e-8
        )
    # Weights that are loaded without the optimizer have no remainders of the weights before.
    split.engine.save_state(tmp_path, with_optimizer=False)
    split.engine.load_state(tmp_path, with_optimizer=False)
    for name, parameter in found.items():
        assert torch.equal(split.engine.optimizer.main(parameter), parameter.float()), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gradients", "moments", "expected"), [("fp32", "fp32", 16), ("bf16", "fp32", 14), ("bf16", "bf16", 10)]
)
def test_bytes_a_parameter(gradients, moments, expected, tiny) -> None:
    precision = BF16 if gradients == "bf16" else BF16[:1]
    config = tiny(*precision, "optimizer.main_weights=remainders", f"optimizer.exp_avg_dtype={moments}")
    trainer = Trainer(config)
    trainer.train()
    parameters = [parameter for _, parameter in trainer.engine.weights.named_parameters()]
    held = [*parameters, *(p.grad for p in parameters), *(p.grad for p in trainer.model.parameters())]
    held = list({x.data_ptr(): x for x in held if x is not None}.values())
    held += [x for p in parameters for x in trainer.engine.optimizer.state[p].values() if x.ndim]
    count = sum(p.numel() for p in parameters)
    assert sum(x.numel() * x.element_size() for x in held) == expected * count


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "moments"), [(BF16[:1], "fp32"), (BF16, "bf16")], ids=["fp32", "bf16"])
def test_a_resumed_run_with_remainders_is_the_same_run(precision, moments, tiny, tmp_path, host) -> None:
    options = [*precision, "optimizer.main_weights=remainders", f"optimizer.exp_avg_dtype={moments}"]
    whole = run(tiny(*options))
    first = run(tiny(*options, "train.exit_iteration=3"), run_dir=tmp_path)
    second = run(tiny(*options), run_dir=tmp_path)
    assert first.losses + second.losses == whole.losses
    names = open_checkpoint(tmp_path / "checkpoints" / "iter_0000006", host).shapes()
    assert not [name for name in names if "remainder" in name]
    assert f"{OPTIMIZER}main.decoder.final_layernorm.weight" in names


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], r"completes bf16 weights, but precision.dtype=fp32"),
        (
            [*BF16, "parallel.use_torch_fsdp2=true"],
            r"use_torch_fsdp2=true shards fp32 .*main_weights=auto",
        ),
    ],
)
def test_remainders_where_they_cannot_be(overrides, words, tiny) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny("optimizer.main_weights=remainders", *overrides)


@pytest.mark.slow
def test_a_run_with_remainders_goes_on_with_copies(tiny, tmp_path) -> None:
    """The checkpoint holds fp32 weights: what goes on is fp32 training, not training from rounded weights."""
    whole = run(tiny(*BF16, "optimizer.main_weights=remainders"))
    first = run(tiny(*BF16, "optimizer.main_weights=remainders", "train.exit_iteration=3"), run_dir=tmp_path)
    second = run(tiny(*BF16), run_dir=tmp_path)
    assert len(second.losses) == 3
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=2e-3)


def test_weights_that_are_set_have_no_remainders_of_those_before(tiny, tmp_path) -> None:
    trainer = Trainer(tiny(*BF16, "optimizer.main_weights=remainders"), run_dir=tmp_path)
    trainer.train()
    trainer.engine.load_state(tmp_path, with_optimizer=False)
    for name, weight in trainer.engine.weights.named_parameters():
        assert torch.equal(trainer.engine.optimizer.main(weight), weight.float()), name


def test_a_family_that_makes_more_of_its_logits_refuses_by_itself(tiny, monkeypatch) -> None:
    class Halved(GPTModel):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().logits(x)

    monkeypatch.setattr("mt_models.gpt.model.build_gpt", Halved)
    with pytest.raises(ConfigError, match="Halved makes more of its logits than a product"):
        Trainer(tiny("train.loss=linear_cross_entropy"))

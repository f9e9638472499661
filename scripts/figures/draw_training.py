"""Training: schedules of the learning rate, the loss scale, and recorded runs."""

from __future__ import annotations

from scripts.figures.axes import Axes
from scripts.figures.registry import figure, recorded
from scripts.figures.svg import Canvas

from mt_core.config.loading import load_config
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.schedules import Horizon
from mt_core.plugins import load_plugins
from mt_core.specs import LR_SCHEDULES

STEPS, BATCH = 1000, 64
HORIZON = Horizon(STEPS * BATCH, BATCH, 3e-4, 3e-5)


def rates(*settings: str) -> list[tuple[float, float]]:
    """(step, learning rate) of a schedule as it is configured."""
    host = load_plugins()
    overrides = [f"train.train_iters={STEPS}", *(f"lr_schedule.{setting}" for setting in settings)]
    config = load_config(preset="gpt-tiny", overrides=overrides, host=host).config.lr_schedule
    build = host[LR_SCHEDULES].get(config.lr_decay_style, key="lr_schedule.lr_decay_style").build.load()
    schedule = build(config, HORIZON)
    return [(step, schedule(step * BATCH)) for step in range(0, STEPS + 1, 5)]


@figure("lr-schedules")
def lr_schedules() -> Canvas:
    canvas = Canvas(680, 330, "Learning rate over 1000 steps under each decay style, with 100 steps of warm-up")
    axes = Axes(canvas, (0, STEPS), (0, 3.4e-4), left=72)
    axes.frame("step", "learning rate", "lr = 3e-4, min_lr = 3e-5, lr_warmup_iters = 100")
    styles = ("constant", "linear", "cosine", "inverse-square-root")
    for colour, style in enumerate(styles):
        axes.curve(rates("lr_warmup_iters=100", f"lr_decay_style={style}"), colour)
    axes.curve(rates("lr_warmup_iters=100", "lr_decay_style=WSD", "lr_wsd_decay_iters=200"), 4)
    axes.legend([*styles, "WSD, lr_wsd_decay_iters = 200"], x=112, y=210)
    return canvas


@figure("lr-wsd-tails")
def wsd_tails() -> Canvas:
    canvas = Canvas(680, 300, "The four tails of the WSD schedule")
    axes = Axes(canvas, (700, STEPS), (0, 3.4e-4), left=72)
    axes.frame("step", "learning rate", "WSD, lr_wsd_decay_iters = 200")
    tails = ("linear", "cosine", "exponential", "minus_sqrt")
    for colour, tail in enumerate(tails):
        points = rates(
            "lr_warmup_iters=100", "lr_decay_style=WSD", "lr_wsd_decay_iters=200", f"lr_wsd_decay_style={tail}"
        )
        axes.curve([point for point in points if point[0] >= 700], colour)
    axes.legend(tails)
    return canvas


@figure("loss-scale")
def loss_scale() -> Canvas:
    """The dynamic loss scale of fp16 under overflows at some steps."""
    canvas = Canvas(
        660, 280, "Dynamic loss scale: doubled after 100 clean steps, halved at the second overflow in a row"
    )
    scaler = LossScaler(scale=2.0**16, dynamic=True, window=100)
    overflows = {40, 130, 131, 320, 321, 322}
    points: list[tuple[float, float]] = []
    for step in range(500):
        points.append((step, scaler.scale))
        scaler.update(step in overflows)
    axes = Axes(
        canvas, (0, 500), (2.0**13, 2.0**20), log=True, y_ticks=[2.0**power for power in range(13, 21)], left=100
    )
    axes.frame("step", "loss scale", "loss_scale_window = 100, hysteresis = 2")
    axes.curve(points, 0)
    axes.points([(step, 2.0**13 * 1.15) for step in sorted(overflows)], 4)
    axes.legend(["loss scale", "overflow"], [0, 4])
    return canvas


@figure("run-loss")
def run_loss() -> Canvas:
    """Loss of `mt train` without arguments."""
    run = recorded("run")
    canvas = Canvas(700, 320, "Training and validation loss of mt train without a configuration")
    steps, losses = run["train"]["iteration"], run["train"]["loss"]
    axes = Axes(canvas, (0, max(steps)), (min(losses) * 0.9, max(losses) * 1.03))
    axes.frame("step", "loss", "mt train: gpt-tiny on the text that Python carries")
    axes.curve(list(zip(steps, losses, strict=True)), 0)
    valid = list(zip(run["valid"]["iteration"], run["valid"]["valid_loss"], strict=True))
    axes.curve(valid, 1)
    axes.points(valid, 1)
    axes.legend(["training", "validation"])
    return canvas


@figure("run-panels")
def run_panels() -> Canvas:
    """Three columns of metrics.jsonl of the same run."""
    run = recorded("run")["train"]
    canvas = Canvas(860, 250, "Loss, gradient norm and learning rate of a run, from its metrics.jsonl")
    panels = (("loss", "loss", 0), ("grad_norm", "gradient norm", 1), ("learning_rate", "learning rate", 2))
    for place, (key, name, colour) in enumerate(panels):
        values = run[key]
        axes = Axes(canvas, (0, max(run["iteration"])), (0, max(values) * 1.06), left=62 + 290 * place, width=206)
        axes.frame("step", "", name)
        axes.curve(list(zip(run["iteration"], values, strict=True)), colour, 1.3)
    return canvas


@figure("optimizers-loss")
def optimizers() -> Canvas:
    runs = recorded("optimizers")
    canvas = Canvas(
        680, 320, "Training loss of a small GPT with four optimizers, each with the better of two learning rates"
    )
    axes = Axes(canvas, (0, 120), (2.0, 6.0))
    axes.frame("step", "loss, mean of 10 steps", "2 layers of width 64, the better of two learning rates each")
    for colour, run in enumerate(runs.values()):
        losses = run["loss"]
        smooth = [sum(losses[max(0, n - 9) : n + 1]) / min(n + 1, 10) for n in range(len(losses))]
        axes.curve([(n + 1, loss) for n, loss in enumerate(smooth)], colour)
    axes.legend([f"{name}, lr {run['lr']:g}" for name, run in runs.items()])
    return canvas


@figure("instructions-loss")
def instructions() -> Canvas:
    run = recorded("instructions")
    canvas = Canvas(680, 300, "Loss of the preset instructions-tiny: training, and words that it has not seen")
    axes = Axes(canvas, (0, run["train"]["iteration"][-1]), (0.0, 3.0))
    axes.frame("step", "loss on answers", "mt train --preset instructions-tiny")
    axes.curve(list(zip(run["train"]["iteration"], run["train"]["loss"], strict=True)), 0, 1.2)
    axes.curve(list(zip(run["valid"]["iteration"], run["valid"]["valid_loss"], strict=True)), 1)
    axes.legend(["training", "new words"])
    return canvas


@figure("low-precision-loss")
def low_precision() -> Canvas:
    """How far the training loss of each recipe is from that of bf16."""
    runs, window = recorded("low_precision"), 20
    others = [name for name in runs if name != "bf16"]
    canvas = Canvas(720, 340, "Training loss of MXFP8 and NVFP4 against bf16, from the same weights and samples")
    axes = Axes(canvas, (0, len(runs["bf16"])), (-0.5, 2.5))
    axes.frame("step", "above bf16 in %", f"bench/fp8.py, a GPT of 2 layers and width 128; means of {window} steps")
    for colour, name in enumerate(others):
        means = [
            (end, 100.0 * (sum(runs[name][end - window : end]) / sum(runs["bf16"][end - window : end]) - 1.0))
            for end in range(window, len(runs["bf16"]) + 1, 2)
        ]
        axes.curve(means, colour)
    axes.legend(others)
    return canvas


@figure("digit-sums-reward")
def digit_sums() -> Canvas:
    run = recorded("digit_sums")
    canvas = Canvas(680, 300, "Share of right sums of three digits while a model learns them by rewards")
    axes = Axes(canvas, (0, run["train"]["iteration"][-1]), (0.0, 1.0))
    axes.frame("step", "share of right sums", "mt tune grpo on the preset digit-sums")
    axes.curve(list(zip(run["train"]["iteration"], run["train"]["reward"], strict=True)), 0)
    axes.curve(list(zip(run["valid"]["iteration"], run["valid"]["valid_reward"], strict=True)), 1)
    axes.legend(["drawn at temperature 1", "likeliest tokens, held-out sums"])
    return canvas


@figure("distillation-loss")
def distillation() -> Canvas:
    runs = recorded("distillation")
    canvas = Canvas(680, 300, "Cross entropy of gpt-tiny-student on validation text, by labels and distilled")
    labels, distilled = runs["labels"], runs["distilled"]
    axes = Axes(canvas, (0, labels["iteration"][-1]), (1.4, 2.8))
    axes.frame("step", "cross entropy", "600 KB of text, of which the teacher has seen 8 MB")
    axes.curve(list(zip(labels["iteration"], labels["valid_loss"], strict=True)), 0)
    axes.curve(list(zip(distilled["iteration"], distilled["valid_cross_entropy"], strict=True)), 1)
    axes.legend(["by labels", "by the distributions of gpt-tiny"])
    return canvas

"""Loss scaling for fp16, with Megatron's rules of growth, back-off and hysteresis."""

from __future__ import annotations

from dataclasses import dataclass

from mt_core.config.schema import PrecisionConfig

# Powers of two change the exponent alone, so scaling and unscaling round nothing.
GROWTH, BACKOFF = 2.0, 0.5


@dataclass
class LossScaler:
    """The factor on the loss, updated after each step by whether a gradient overflowed."""

    scale: float
    dynamic: bool
    min_scale: float = 1.0
    window: int = 1000
    """Steps without overflow after which the scale doubles."""
    hysteresis: int = 2
    """Number of overflows before the scale halves (hysteresis)."""
    clean_steps: int = 0
    patience: int = 2

    def update(self, overflowed: bool) -> None:
        if not self.dynamic:
            return
        if overflowed:
            self.clean_steps = 0
            self.patience -= 1
            # Patience is not refilled here, as in Megatron: every further overflow halves the scale, until a whole
            # window is clean.
            if self.patience <= 0:
                self.scale = max(self.scale * BACKOFF, self.min_scale)
            return
        self.clean_steps += 1
        if self.clean_steps == self.window:
            self.clean_steps = 0
            self.patience = self.hysteresis
            self.scale *= GROWTH

    @property
    def exhausted(self) -> bool:
        """Whether the scale has reached its minimum and cannot be reduced further."""
        return not self.dynamic or self.scale <= self.min_scale

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "clean_steps": self.clean_steps, "patience": self.patience}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.clean_steps = int(state["clean_steps"])
        self.patience = int(state["patience"])


def build_loss_scaler(config: PrecisionConfig) -> LossScaler:
    """Dynamic for fp16; for other dtypes constant 1."""
    if config.dtype != "fp16":
        return LossScaler(scale=1.0, dynamic=False)
    if config.loss_scale is not None:
        return LossScaler(scale=config.loss_scale, dynamic=False)
    return LossScaler(
        scale=config.initial_loss_scale,
        dynamic=True,
        min_scale=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        patience=config.hysteresis,
    )

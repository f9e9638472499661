"""The training loop and what surrounds it. `Trainer` is the way in."""

from mt_core.train.callbacks import Callback
from mt_core.train.trainer import Trainer, TrainResult

__all__ = ["Callback", "TrainResult", "Trainer"]

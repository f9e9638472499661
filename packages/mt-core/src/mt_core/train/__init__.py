"""The training engine, the loop around it, and callbacks. `Trainer` runs a configuration, `Engine` a custom loop."""

from mt_core.train.callbacks import Callback, Run
from mt_core.train.engine import Engine
from mt_core.train.state import TrainResult
from mt_core.train.trainer import Trainer

__all__ = ["Callback", "Engine", "Run", "TrainResult", "Trainer"]

"""What a run does when it is asked while it trains (`mt ctl`): save, evaluate, stop, note, change a value.

The first rank looks for requests (`mt_core.run_requests`); all ranks agree on them after a step and carry them out
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.config.loading import LoadedConfig, with_changed_key
from mt_core.config.schema import Config
from mt_core.errors import ConfigError, MtError, did_you_mean
from mt_core.parallel.first_rank import on_first_rank
from mt_core.plugins import PluginHost
from mt_core.run_requests import RequestFolder, RunRequest
from mt_core.specs import RUN_REQUESTS
from mt_core.train import build
from mt_core.train.callbacks import Run
from mt_core.train.engine import Engine
from mt_core.train.validation import Evaluator, Validation


class ControlledRun(Run, Protocol):
    """The part of the running `Trainer` that requests may use, on all ranks and between two steps."""

    validation: Validation
    evaluators: list[Evaluator]

    @property
    def last_iteration(self) -> int:
        """The last step of training without an early stop."""
        ...

    def save_now(self) -> Path:
        """Write a checkpoint of this step. Raises ConfigError without a run directory."""
        ...

    def evaluate_now(self) -> Mapping[str, float]:
        """Values of the validation sets by name."""
        ...

    def change(self, config: Config, key: str, change: Mapping[str, Any]) -> None:
        """Go on with another value of a key; later checkpoints and their resumes have it."""
        ...


CHANGES = "changes_by_hand"
"""Entry of a checkpoint's metadata: the values that were changed while the run trained, by key."""


class RunControl:
    """The requests of a run directory; of a run without one there are none."""

    def __init__(self, run: ControlledRun) -> None:
        self.run = run
        directory = run.directory
        self.folder = RequestFolder(directory.path) if directory is not None and run.ctx.is_writer else None

    def waits(self) -> bool:
        """Whether a request waits; on ranks beside the first never."""
        return self.folder is not None and self.folder.waits()

    def carry_out(self) -> None:
        """Collective over the world."""
        for request in on_first_rank(lambda: self.folder.take() if self.folder else [], self.run.ctx.world):
            ok, text = self._outcome(request)
            what = {"command": request.command, "argument": request.argument, "by": request.by}
            self.run.event("control", **what, ok=ok, answer=text)
            self.run.message(f"mt ctl {request.command} {request.argument} (by {request.by}): {text}")
            if self.folder is not None:
                self.folder.answer(request, ok=ok, text=text, iteration=self.run.state.iteration)

    def _outcome(self, request: RunRequest) -> tuple[bool, str]:
        """Whether it was carried out, and the answer. An error of a request ends no training."""
        try:
            answer = self.run.host[RUN_REQUESTS].get(request.command).answer.load()
            return True, answer(self.run, request.argument, request.by)
        except MtError as error:
            return False, str(error)


# -- requests that mt-core answers -------------------------------------------------------------------


def answer_save(run: ControlledRun, argument: str, by: str) -> str:
    _refuse_argument("save", argument)
    path = run.save_now()
    return f"saved {path}"


def answer_evaluate(run: ControlledRun, argument: str, by: str) -> str:
    _refuse_argument("eval", argument)
    values = run.evaluate_now()
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items()) or "there is no validation set"


def answer_stop(run: ControlledRun, argument: str, by: str) -> str:
    run.stop(f"mt ctl stop by {by}" + (f": {argument}" if argument else ""))
    return f"saves and stops after step {run.state.iteration}"


def answer_note(run: ControlledRun, argument: str, by: str) -> str:
    if not argument:
        raise ConfigError("mt ctl RUN note TEXT needs a text")
    return "noted"


def _refuse_argument(command: str, argument: str) -> None:
    if argument:
        raise ConfigError(f"mt ctl RUN {command} takes nothing behind it; given {argument!r}")


# -- set KEY=VALUE -----------------------------------------------------------------------------------


def _new_schedules(engine: Engine) -> None:
    engine.schedule = build.build_schedule(engine.config, engine.host)
    engine.group_schedules = build.build_group_schedules(engine.config, engine.host)


def _new_clipping(engine: Engine) -> None:
    engine.step.clip_grad = engine.config.optimizer.clip_grad


def _read_each_step(engine: Engine) -> None:
    """The value is read from the configuration whenever it is needed."""


CHANGEABLE: Mapping[str, Callable[[Engine], None]] = {
    "optimizer.lr": _new_schedules,
    "optimizer.min_lr": _new_schedules,
    "optimizer.clip_grad": _new_clipping,
    "train.eval_interval": _read_each_step,
    "train.eval_iters": _read_each_step,
    "train.exit_iteration": _read_each_step,
    "train.sample_prompt": _read_each_step,
    "train.sample_tokens": _read_each_step,
    "checkpoint.save_interval": _read_each_step,
    "logging.log_interval": _read_each_step,
}
"""Keys that a run can change, and what follows from the new value. Others would change the layout, the model, the data,
or the length of the schedule, which a resumed run could not repeat."""


NO_VALUES = ("", "None", "none", "NULL", "nil")
"""What others write for null; for a text it could be meant as one."""


def _refuse_past_step(run: ControlledRun, value: int | None) -> None:
    if value is not None and not run.state.iteration < value <= run.last_iteration:
        raise ConfigError(f"train.exit_iteration={value}: {_steps_left(run)}")


def _steps_left(run: ControlledRun) -> str:
    now, last = run.state.iteration, run.last_iteration
    allowed = f"{now + 1} to {last}, or null for none" if now < last else "null"
    return f"the run is at step {now} and ends at step {last}; it can be {allowed} (mt ctl RUN stop ends the run now)"


def _refuse_no_evaluations(run: ControlledRun, value: int | None) -> None:
    patience = run.config.train.early_stop_patience
    if value is None and patience is not None:
        raise ConfigError(
            f"train.eval_interval=null: train.early_stop_patience={patience} counts evaluations; give a number of steps"
        )
    if value is not None and not run.validation.sets and not run.evaluators:
        raise ConfigError(f"train.eval_interval={value}: the run has no validation set, so that nothing is evaluated")


def _refuse_more_than_there_is(run: ControlledRun, value: int) -> None:
    if run.config.train.full_validation:
        raise ConfigError(f"train.eval_iters={value}: train.full_validation takes every sample, whatever the value is")
    size = run.engine.batch_size.full
    most = min((-(-len(dataset) // size) for dataset in run.validation.sets.values()), default=0)
    if not most:
        raise ConfigError(f"train.eval_iters={value}: the run has no validation set; it began with eval_iters=0")
    if not 1 <= value <= most:
        raise ConfigError(
            f"train.eval_iters={value}: the validation set that the run has built holds {most} global batches; it can "
            f"be 1 to {most} (train.eval_interval=null ends evaluations)"
        )


REFUSALS: Mapping[str, Callable[[ControlledRun, Any], None]] = {
    "train.exit_iteration": _refuse_past_step,
    "train.eval_interval": _refuse_no_evaluations,
    "train.eval_iters": _refuse_more_than_there_is,
}
"""What a valid configuration may have and this run cannot use at this step."""


def answer_set(run: ControlledRun, argument: str, by: str) -> str:
    key = argument.partition("=")[0].strip()
    if key not in CHANGEABLE:
        raise ConfigError(
            f"mt ctl RUN set {key or 'KEY=VALUE'}: a running training changes {', '.join(CHANGEABLE)}"
            f"{did_you_mean(key, CHANGEABLE)}; for other keys start a new run with checkpoint.load"
        )
    value = argument.partition("=")[2].strip()
    if value in NO_VALUES:
        raise ConfigError(f"mt ctl RUN set {argument}: {value or 'nothing'} is no value; null sets none")
    before, origin = value_of(run.config, key), f"mt ctl set by {by} (step {run.state.iteration})"
    config = _changed(run, key, argument, origin)
    after = value_of(config, key)
    if (refuse := REFUSALS.get(key)) is not None:
        refuse(run, after)
    run.change(config, key, {"before": before, "after": after, "origin": origin})
    CHANGEABLE[key](run.engine)
    return f"{key} is {_shown(after)} from step {run.state.iteration + 1} on, {_shown(before)} before"


def _changed(run: ControlledRun, key: str, argument: str, origin: str) -> Config:
    """Raises ConfigError with what the key can be now."""
    try:
        return with_changed_key(run.config, argument, origin, run.host)
    except ConfigError as error:
        if argument.partition("=")[2].strip() == "null":
            now = _shown(value_of(run.config, key))
            raise ConfigError(f"{key} needs a value, and null is none; it is {now} now") from None
        more = f"; {_steps_left(run)}" if key == "train.exit_iteration" else ""
        raise ConfigError(f"{error}{more}") from None


def _shown(value: Any) -> Any:
    return "null" if value is None else repr(value) if isinstance(value, str) else value


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def changes_to_store(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a checkpoint's metadata."""
    return {CHANGES: dict(changes)} if changes else {}


def stored_changes(checkpoint: Path, host: PluginHost) -> dict[str, dict[str, Any]]:
    return dict(open_checkpoint(checkpoint, host).metadata.get(CHANGES, {}))


def with_stored_changes(loaded: LoadedConfig, stored: Mapping[str, Mapping[str, Any]]) -> LoadedConfig:
    """The configuration of a run that is resumed, with the values that were changed while it trained.

    A key that still has the value of before the change gets the changed one; one with another value is left to the
    comparison with the checkpoint.
    """
    origins, config = dict(loaded.origins), loaded.config
    for key, change in stored.items():
        section, _, name = key.partition(".")
        if value_of(config, key) == change["before"]:
            part = getattr(config, section).model_copy(update={name: change["after"]})
            config = config.model_copy(update={section: part})
            origins[key] = change["origin"]
    return replace(loaded, config=config, origins=origins)

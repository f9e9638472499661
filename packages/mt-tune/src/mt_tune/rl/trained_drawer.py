"""Completions by the processes that train: with the weights that are trained, or with a copy of them, in a
thread beside training where that is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from mt_core.train.engine import Engine
from mt_infer.text import TextGenerator
from mt_tune.rl.drawing import Drawer, DrawOptions, Until, with_cache_for
from mt_tune.rl.episodes import Episodes
from mt_tune.rl.rollout import Group
from mt_tune.rl.weight_hashes import digest, module_dtypes, module_hashes, require_equal, trained_hashes


class BackgroundRound:
    """At most one at a time. On a GPU it has a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._running: Future[None] | None = None
        self.is_closing = False
        """Asks the round to end early."""

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def start(self, draw: Callable[[], None]) -> None:
        assert self._running is None
        # After what this thread has launched: the copy of the weights.
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if on_gpu else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        self._running = self._threads.submit(_on_stream, stream, draw)

    def finish(self) -> None:
        """Waits for the round, and raises its error."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        self.is_closing = True
        self._threads.shutdown(wait=True)


def _on_stream(stream: Any, draw: Callable[[], None]) -> None:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        draw()
    if stream is not None:
        stream.synchronize()


class TrainedDrawer(Drawer):
    """Draws with the weights of a training engine. Calls are collective over its world.

    layout: keys of [parallel] for a copy of the weights; None for the run's own layout and memory. most: completions
    that are drawn at a time. in_background: `start` returns at once, and a thread draws.
    """

    def __init__(
        self,
        engine: Engine,
        layout: dict[str, Any] | None,
        most: int,
        episodes: Episodes | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        self.engine, self.has_copy = engine, layout is not None
        positions: Any = engine.model.max_sequence_length
        training = replace(engine, config=with_cache_for(engine.config, most, positions))
        generator = TextGenerator.of_engine(training, layout)
        super().__init__(generator, engine.ctx.world, engine.state.iteration, episodes)
        self.background = BackgroundRound(engine.device) if in_background else None
        self.digest: str | None = None
        """Digest of the weights that generate, where they are a copy of those that are trained."""

    def use_new_weights(self) -> None:
        """Takes over the weights of training after a step. Raises TrainingError for a copy that is not what is
        trained."""
        is_new = self.version != self.engine.state.iteration
        if is_new:
            self.generator.refit(self.engine)
            self.version = self.engine.state.iteration
            self.routing.forget()
        if self.has_copy and (is_new or self.digest is None):
            self.digest = self._verified()

    def _verified(self) -> str:
        generating = self.lockstep.engine
        copied = module_hashes(generating.model, generating.ctx)
        dtypes = module_dtypes(generating.model, generating.ctx.world)
        require_equal(trained_hashes(self.engine, dtypes), copied, self.version)
        return digest(copied)

    def start(self, groups: Sequence[Group], options: DrawOptions, until: Until) -> None:
        """Draws, in the background if this drawer has one; `finish` waits for that."""
        background = self.background
        if background is None:
            self.draw(groups, options, until)
        else:
            background.start(lambda: self.draw(groups, options, lambda drawn: background.is_closing or until(drawn)))

    def finish(self) -> None:
        if self.background is not None:
            self.background.finish()

    def close(self) -> None:
        if self.background is not None:
            self.background.close()
        if self.episodes is not None:
            self.episodes.close()

"""Completions by processes of their own, which have a copy of the weights in a layout of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mt_core.errors import TrainingError
from mt_core.parallel.first_rank import all_gather_objects, on_first_rank, raise_on_all_ranks
from mt_core.train.engine import Engine
from mt_tune.rl.drawing import DrawOptions, Until
from mt_tune.rl.generators.messages import Answer, Draw, GeneratorSetup, Message, NewWeights, Ready
from mt_tune.rl.generators.placement import placement
from mt_tune.rl.generators.processes import GeneratorProcesses
from mt_tune.rl.generators.weight_transfer import (
    WeightSender,
    arriving_at,
    join_transfer,
    plan_transfer,
    slices_of,
)
from mt_tune.rl.rollout import Group
from mt_tune.rl.weight_hashes import Dtypes, Hashes, digest, require_equal, trained_fragments, trained_hashes

T = TypeVar("T")


class GeneratorDrawer:
    """Has the methods of TrainedDrawer; construction and calls are collective over the processes that train.

    One process of each node starts the generators of the node and ends them. The first of training sends groups to
    the first generator and gets their completions. Between a message and its answer training goes on.

    size: number of generators. layout: keys of [parallel] for them. most: completions that are drawn at a time.
    """

    def __init__(self, engine: Engine, size: int, layout: dict[str, Any], most: int) -> None:
        self.engine, self.world, self.size = engine, engine.ctx.world, size
        self.version, self.digest = -1, ""
        self._drawn: Sequence[Group] | None = None
        """The groups of a round whose answer is awaited."""
        self.place = placement(size, self.world, engine.device)
        self.store: dist.Store | None = None
        port = on_first_rank(self._listen, self.world)
        self.processes = self._together(lambda: GeneratorProcesses(self._setups(port, layout, most)))
        try:
            self.sender, self.dtypes = self._connected(port)
            self.use_new_weights()
        except BaseException:
            self.close()
            raise

    # -- the beginning --------------------------------------------------------------------------------

    def _listen(self) -> int:
        """The port of the store through which generators meet one another and training. On the first process."""
        store = dist.TCPStore(self.place.address, 0, is_master=True, wait_for_workers=False)
        self.store = store
        return store.port

    def _setups(self, port: int, layout: dict[str, Any], most: int) -> Iterator[GeneratorSetup]:
        config = {**self.engine.config.to_dict(), "parallel": layout}
        for rank in self.place.ranks_of(self.world.rank):
            yield GeneratorSetup(
                config=config,
                rank=rank,
                size=self.size,
                device=self.place.device_of(rank, self.engine.device.type),
                address=self.place.address,
                port=port,
                trainers=self.world.size,
                most=most,
                version=self.engine.state.iteration,
                timeout_seconds=self._timeout,
                path=sys.path,
            )

    @property
    def _timeout(self) -> float:
        return self.engine.config.timeouts.step

    def _connected(self, port: int) -> tuple[WeightSender, Dtypes]:
        """Once all models are built, the plan of what is sent, and the group over which it is sent."""
        ready = self._ready()
        trained = all_gather_objects(slices_of(trained_fragments(self.engine)), self.world)
        plan = plan_transfer(trained, [ready[rank].slices for rank in range(self.size)])
        self._send({rank: arriving_at(self.world.size + rank, plan) for rank in self._own})
        if self.store is None:
            self.store = dist.TCPStore(self.place.address, port, is_master=False)
        size = self.world.size + self.size
        group = join_transfer(self.store, self.world.rank, size, self.engine.device, self._timeout)
        self._answers()
        dtypes = {name: dtype for generator in ready.values() for name, dtype in generator.dtypes.items()}
        return WeightSender(self.engine, plan, dtypes, group), dtypes

    def _ready(self) -> dict[int, Ready]:
        """What each generator needs, by rank."""
        local_ready = {rank: answer.ready for rank, answer in self._answers().items() if answer.ready is not None}
        return {
            rank: ready for of_rank in all_gather_objects(local_ready, self.world) for rank, ready in of_rank.items()
        }

    # -- rounds ---------------------------------------------------------------------------------------

    def use_new_weights(self) -> None:
        """Sends the weights of training after a step. Raises TrainingError where what has arrived is something else."""
        version = self.engine.state.iteration
        if self.version == version:
            return
        self._send(dict.fromkeys(self._own, NewWeights(version)))
        answers = self._together(self._send_weights)
        trained = trained_hashes(self.engine, self.dtypes)
        self.digest = on_first_rank(lambda: self._verified(trained, answers[0].hashes, version), self.world)
        self.version = version

    def _send_weights(self) -> dict[int, Answer]:
        failure: Exception | None = None
        try:
            self.sender.send()
        except RuntimeError as error:
            failure = TrainingError(f"the weights could not be sent to the processes that generate: {error}")
        # A generator that has ended says why before those that could not send to it.
        answers = self.processes.answers()
        if failure is not None:
            raise failure
        return answers

    @staticmethod
    def _verified(trained: Hashes, copied: Hashes, version: int) -> str:
        require_equal(trained, copied, version)
        return digest(copied)

    def start(self, groups: Sequence[Group], options: DrawOptions, until: Until | None) -> None:
        """Has generators continue the groups; `finish` waits for it. until: can be pickled."""
        self._drawn = list(groups)
        # One makes the requests, and the others take part.
        self._send({rank: Draw([] if rank else self._drawn, options, until) for rank in self._own})

    def finish(self) -> None:
        """The groups have their new tokens then, on the first process."""
        groups, self._drawn = self._drawn, None
        if groups is None:
            return
        answers = self._answers()
        if self.world.rank == 0:
            for group, rollouts in zip(groups, answers[0].rollouts, strict=True):
                group.rollouts = list(rollouts)

    def draw(self, groups: Sequence[Group], options: DrawOptions, until: Until | None = None) -> None:
        self.start(groups, options, until)
        self.finish()

    def close(self) -> None:
        self.processes.close()

    # -- errors of one process are those of all -------------------------------------------------------

    @property
    def _own(self) -> range:
        return self.place.ranks_of(self.world.rank)

    def _send(self, messages: Mapping[int, Message]) -> None:
        self._together(lambda: self.processes.send(messages))

    def _answers(self) -> dict[int, Answer]:
        return self._together(self.processes.answers)

    def _together(self, act: Callable[[], T]) -> T:
        value, error = None, None
        try:
            value = act()
        except Exception as raised:
            error = raised
        raise_on_all_ranks(error, self.world)
        return cast(T, value)

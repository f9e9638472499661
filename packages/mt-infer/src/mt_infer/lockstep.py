"""One engine over several ranks: rank 0 takes the requests, all ranks step together.

Every rank of a model replica (along tp and pp) has a scheduler, and all make the same decisions from the same requests
and tokens; only new requests and ends are sent. Requests are dealt to the replicas along dp. Replicas step together,
since experts may be sharded over them: one without work computes a position of filler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mt_core.errors import ConfigError
from mt_infer.engine import REQUESTS_RUN, InferenceEngine
from mt_infer.requests import EngineStatistics, Request, TokenEvent
from mt_infer.sampling.noise import new_seed
from mt_infer.sampling.parameters import SamplingParameters


@dataclass(frozen=True)
class Command:
    """What rank 0 sends to the others before a step. replica: None for all of them."""

    name: str
    replica: int | None
    arguments: tuple[Any, ...] = ()


STOP = Command("stop", None)
RUNNING = Command("running", None)
"""In place of the commands before an update of weights: no rank may begin it."""


@dataclass(frozen=True)
class _Gathered:
    """What a step gave on a replica."""

    replica: int
    events: list[TokenEvent]
    statistics: EngineStatistics


# One step, on dp=2, tp=2, with world ranks 0 and 1 in replica 0, 2 and 3 in replica 1:
#   rank 0     broadcast of its commands        (all ranks)
#   all        the commands of their replica, on the engine
#   all        engine.step(fill=True)           (collectives within the replica, and of experts across replicas)
#   0, 2       their events                     (gathered on rank 0)
# Ranks of a replica but the first drop their events, which are the same.
class LockstepEngine:
    """Has the methods of InferenceEngine, on rank 0; the other ranks call `follow`, which returns when rank 0 closes.

    In one process it passes calls on. Requests without a seed are given one.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine, self.ctx = engine, engine.ctx
        self._commands: list[Command] = []
        self._open: dict[int, int] = {}
        """Request -> its replica."""
        self._unfinished: dict[int, set[int]] = {}
        """Request -> numbers of its sequences that have not ended."""
        self._ids = count()
        self._of_replicas = [engine.statistics] * self.replicas
        """On rank 0, where there are several: as of the last step."""

    @property
    def replicas(self) -> int:
        return self.ctx.dp.size

    @property
    def statistics(self) -> list[EngineStatistics]:
        """On rank 0: of each replica."""
        return [self.engine.statistics] if self.replicas == 1 else self._of_replicas

    @property
    def is_idle(self) -> bool:
        return not self._unfinished and not self._commands

    def add(
        self,
        tokens: Sequence[int],
        sampling: SamplingParameters | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        adapter: str | None = None,
    ) -> int:
        """Adds a request like InferenceEngine.add; it goes to the replica with the fewest requests."""
        sampling = sampling or SamplingParameters()
        if sampling.seed is None:
            sampling = replace(sampling, seed=new_seed())
        request = Request(next(self._ids), tuple(tokens), sampling, inputs or {}, adapter)
        # Before anything is sent: an error here is the caller's, and the request goes no further. What is sent must not
        # fail, since ranks would then no longer be in step.
        self.engine.check(request)
        # In requests, which rank 0 counts itself; its view of the caches of other replicas is a step old. The first of
        # equals.
        loads = [sum(replica == number for replica in self._open.values()) for number in range(self.replicas)]
        replica = loads.index(min(loads))
        self._open[request.id], self._unfinished[request.id] = replica, set(range(sampling.sequences))
        self._commands.append(Command("add_request", replica, (request,)))
        return request.id

    def cancel(self, request: int) -> None:
        """Its memory is free after the next step; no events of it follow."""
        replica = self._open.pop(request, None)
        # None: the request has ended, and its end has not reached the caller yet.
        if replica is not None:
            del self._unfinished[request]
            self._commands.append(Command("cancel", replica, (request,)))

    def finish(self, request: int, index: int) -> None:
        """Ends one sequence; one that has ended in the last step already stays as it is."""
        if index in self._unfinished.get(request, ()):
            self._commands.append(Command("finish", self._open[request], (request, index)))
            self._ended(request, index)

    def load_adapter(self, name: str, folder: Path) -> None:
        """See InferenceEngine. Works while requests run, on one process, which alone can refuse what it finds."""
        self._require_one_process()
        self.engine.load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        self._require_one_process()
        # What was cancelled, or has come with this step, first.
        self._carry_out(self._commands)
        self._commands = []
        self.engine.unload_adapter(name)

    def _require_one_process(self) -> None:
        if self.ctx.world.size > 1:
            raise ConfigError("several processes serve this model, which have the adapters that they were started with")

    def weights_changed(self) -> None:
        """On every rank: see InferenceEngine. What was cancelled before it ends first."""
        # Every rank calls weights_changed(); what rank 0 sends decides, so that all raise or none does.
        shared = self._shared([RUNNING] if self._unfinished else self._commands)
        if RUNNING in shared:
            raise ConfigError(REQUESTS_RUN)
        self._commands = []
        # Cancelled requests leave the engine first, which refuses an update of weights while it has requests.
        self._carry_out(shared)
        self.engine.weights_changed()

    def step(self) -> list[TokenEvent]:
        """One forward pass on every replica. Events of requests that were cancelled are left out."""
        # Swapped before the step: what it raises does not send them again.
        commands, self._commands = self._commands, []
        # `_open` drops a request when it is cancelled, while its last events are on their way.
        events = [event for event in self._together(commands) if event.request in self._open]
        for event in events:
            if event.finish is not None:
                self._ended(event.request, event.index)
        return events

    def follow(self) -> None:
        """On ranks other than 0: steps with rank 0 until it closes."""
        while self.take_part():
            pass

    def take_part(self) -> bool:
        """On ranks other than 0: one step with rank 0. False when it has closed."""
        # By identity: a step without events is an empty list too.
        return self._together(None) is not CLOSED

    def close(self) -> None:
        """On rank 0: `follow` returns on the others."""
        if self.ctx.world.size > 1:
            self._shared([STOP])

    def _together(self, commands: list[Command] | None) -> list[TokenEvent]:
        shared = self._shared(commands)
        if STOP in shared:
            return CLOSED
        self._carry_out(shared)
        # With several replicas a step without work computes filler: an all-to-all of experts needs all of its ranks.
        return self._gathered(self.engine.step(fill=self.replicas > 1))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            # Names are those of engine methods and come from rank 0 of this program (`add_request`, `cancel`,
            # `finish`).
            if command.replica in (None, self.ctx.dp.rank):
                getattr(self.engine, command.name)(*command.arguments)

    def _shared(self, commands: list[Command] | None) -> list[Command]:
        """Rank 0's commands, on every rank."""
        if self.ctx.world.size == 1:
            return commands or []
        # Pickled among the ranks of one launch, over its process group; nothing of a client is unpickled. It waits for
        # rank 0, which may be idle for as long as its caller has no work: see the server's HEARTBEAT_SECONDS.
        box = [commands]
        dist.broadcast_object_list(box, src=0)
        return box[0] or []

    def _gathered(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """The events of all replicas, on rank 0, which gets their statistics too; none on the others."""
        if self.replicas == 1:
            return events
        # Ranks of tp and pp have the same events: from_last_stage gave them to all.
        is_first = self.ctx.tp.rank == 0 and self.ctx.pp.rank == 0
        local = _Gathered(self.ctx.dp.rank, events, self.engine.statistics) if is_first else None
        everyone: list[_Gathered | None] = [None] * self.ctx.world.size
        dist.gather_object(local, everyone if dist.get_rank() == 0 else None)
        parts = sorted((part for part in everyone if part is not None), key=lambda part: part.replica)
        self._of_replicas = [part.statistics for part in parts]
        return [event for part in parts for event in part.events]

    def _ended(self, request: int, index: int) -> None:
        """One sequence of the request has ended."""
        self._unfinished[request].discard(index)
        if not self._unfinished[request]:
            del self._unfinished[request], self._open[request]


CLOSED: list[TokenEvent] = []
"""What a step gives when rank 0 has closed."""

"""Completions by the engine of mt-infer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mt_core.config.schema import Config
from mt_core.errors import TrainingError
from mt_core.nn.layout import stream_seed
from mt_core.parallel.context import Axis
from mt_core.parallel.first_rank import all_gather_objects, raise_on_all_ranks
from mt_infer.config import InferenceConfig
from mt_infer.requests import FinishReason, TokenEvent
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator
from mt_tune.rl.episodes import Episodes
from mt_tune.rl.rollout import Finish, Group, Rollout
from mt_tune.rl.routing_record import Parts, RoutingByPrefix, RoutingRecorder, decoded, encoded, joined
from mt_tune.rl.routing_replay import ReplayingModel

Until = Callable[[Sequence[Group]], bool]


@dataclass(frozen=True)
class DrawOptions:
    """temperature: 0 takes the likeliest tokens. most: tokens of a completion. ends: ids that end one."""

    temperature: float
    most: int
    ends: frozenset[int]
    seed: int


class Drawer:
    """Draws completions; every call is collective over `world`, the processes that generate.

    One of them makes the requests, which the engine deals to all of its replicas; it has the episodes, if the run has
    environments. version: number of the optimizer step whose weights generate.
    """

    def __init__(self, generator: TextGenerator, world: Axis, version: int, episodes: Episodes | None = None) -> None:
        self.generator, self.world, self.version, self.episodes = generator, world, version, episodes
        self.lockstep = generator.engine
        self.recorder: RoutingRecorder | None = None
        model: Any = self.lockstep.engine.model
        if isinstance(model, ReplayingModel):
            self.recorder = model.recorder = RoutingRecorder()
        self.routing = RoutingByPrefix()

    def draw(self, groups: Sequence[Group], options: DrawOptions, until: Until | None = None) -> None:
        """Continues the unfinished completions of the groups until they end, or until `until` of all the groups is
        true; the groups of rank 0 have them then.

        Raises TrainingError for logits that are not numbers.
        """
        world, error = self.world, None
        drawing: _Drawing | None = None
        if world.rank == 0:
            try:
                drawing = self._drawing(groups, options)
                drawing.run(until)
            except Exception as raised:
                error = raised
            finally:
                self.lockstep.close()
        else:
            self.lockstep.follow()
        raise_on_all_ranks(error, world)
        if self.recorder is not None:
            parts = all_gather_objects(self.recorder.take(), world)
            if drawing is not None:
                drawing.keep_routing({request: part for of_rank in parts for request, part in of_rank.items()})

    def _drawing(self, groups: Sequence[Group], options: DrawOptions) -> _Drawing:
        if self.episodes is None:
            return _Drawing(self, groups, options)
        return _EpisodeDrawing(self, groups, options, self.episodes)


def with_cache_for(config: Config, most: int, positions: int | None) -> Config:
    """The configuration with a cache for so many sequences of data.seq_length positions at most, in place of one for as
    many as half of the free memory holds, which training needs. positions: of the model; None without a limit."""
    keys = config.section(InferenceConfig)
    changed = {"max_requests": min(keys.max_requests, most)}
    if keys.max_sequence_length is None:
        # The last token of a completion is no input.
        longest = config.data.seq_length + 1
        changed["max_sequence_length"] = longest if positions is None else min(longest, positions)
    return config.model_copy(update={"inference": keys.model_copy(update=changed)})


class _Drawing:
    """One `draw` on rank 0."""

    def __init__(self, drawer: Drawer, groups: Sequence[Group], options: DrawOptions) -> None:
        self.drawer, self.options, self.groups = drawer, options, groups
        self.open: dict[int, Rollout] = {}
        self.requests: list[tuple[int, Group, Rollout]] = []
        self.places = {
            id(rollout): (group, number) for group in groups for number, rollout in enumerate(group.rollouts)
        }

    def begin(self) -> None:
        for group in self.groups:
            for rollout in group.rollouts:
                if rollout.finish is None:
                    self._open(rollout)

    def _open(self, rollout: Rollout) -> None:
        group, number = self.places[id(rollout)]
        request = self._request(group, number, rollout)
        self.open[request] = rollout
        self.requests.append((request, group, rollout))

    def _request(self, group: Group, number: int, rollout: Rollout) -> int:
        # Each completion has a random stream of its own, which depends neither on the layout nor on what else is drawn;
        # one that is continued takes another part of it.
        name = f"rollout:{group.position}:{number}:{len(rollout.tokens)}"
        sampling = SamplingParameters(
            temperature=self.options.temperature,
            max_tokens=self.options.most - len(rollout.tokens),
            seed=stream_seed(self.options.seed, name),
            logprobs=0,
            drawn_logprobs=True,
            # Ends are found here: an engine reports neither the token that ends a text nor its probability.
            ignore_eod=True,
        )
        return self.drawer.lockstep.add([*group.tokens_before(rollout), *rollout.tokens], sampling)

    def run(self, until: Until | None) -> None:
        self.begin()
        while self.is_busy and not (until is not None and until(self.groups)):
            self.step()
        # The next step of the engine drops them: their tokens are kept, and the prompt of another request.
        for request in self.open:
            self.drawer.lockstep.cancel(request)

    def keep_routing(self, parts: Parts) -> None:
        """Gives completions the experts that their tokens went through."""
        for request, group, rollout in self.requests:
            before = group.tokens_before(rollout)
            tokens = [*before, *rollout.tokens]
            new = self.drawer.routing.completed(tokens, len(before), parts.get(request, ()))
            experts = joined(decoded(rollout.experts), new)
            rollout.experts = "" if experts is None else encoded(experts)

    @property
    def is_busy(self) -> bool:
        return bool(self.open)

    def step(self) -> None:
        for event in self.drawer.lockstep.step():
            self._take(event)

    def _take(self, event: TokenEvent) -> None:
        rollout = self.open.get(event.request)
        if rollout is None:
            return
        if event.error is not None:
            raise TrainingError(f"drawing completions: {event.error}")
        if event.token is not None and event.logprobs is not None:
            rollout.add(event.token, event.logprobs.token, self.drawer.version)
        ended = event.token in self.options.ends
        if ended or event.finish is FinishReason.LENGTH:
            self.drawer.lockstep.finish(event.request, event.index)
            del self.open[event.request]
            self._end(rollout, "stop" if ended else "length")

    def _end(self, rollout: Rollout, finish: Finish) -> None:
        rollout.finish = finish


class _EpisodeDrawing(_Drawing):
    """The same of completions with environments, which act while others are drawn."""

    def __init__(self, drawer: Drawer, groups: Sequence[Group], options: DrawOptions, episodes: Episodes) -> None:
        super().__init__(drawer, groups, options)
        self.episodes = episodes

    def begin(self) -> None:
        self.episodes.begin(self.groups)

    @property
    def is_busy(self) -> bool:
        return bool(self.open) or self.episodes.is_busy

    def step(self) -> None:
        for rollout in self.episodes.ready(wait=not self.open):
            self._open(rollout)
        if self.open:
            super().step()

    def _end(self, rollout: Rollout, finish: Finish) -> None:
        self.episodes.end_turn(rollout, finish)

"""Conversations of completions with environments, on the process that draws: tokens in, tokens out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mt_core.errors import DataError
from mt_tune.environments.base import EpisodeError
from mt_tune.environments.dialogues import Reply
from mt_tune.environments.episodes import ReadTurn, TokenConversation, plain_turn, turn_reader
from mt_tune.environments.pool import Answer, DialoguePool, DialogueSeat
from mt_tune.environments.turns import TurnEncoder
from mt_tune.rl.prompts import Prompt
from mt_tune.rl.rollout import EpisodeRecord, Finish, Group, Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeLimits:
    """max_turns: of the model; None without a bound. most: tokens of a completion, with those that environments add.
    positions: data.seq_length. skip_failures: a completion whose environment fails behind the beginning is left out,
    where it ends the run otherwise."""

    max_turns: int | None
    most: int
    positions: int
    skip_failures: bool


@dataclass
class _OpenEpisode:
    """A completion whose conversation goes on. start: number of the first token of the model's turn. finish: how the
    completion ends when the environment has answered; None where it may go on."""

    prompt: Prompt
    rollout: Rollout
    seat: DialogueSeat
    conversation: TokenConversation | None = None
    start: int = 0
    finish: Finish | None = None


class Episodes:
    """Begins conversations, gives the model's turns to environments, and adds what they answer to completions."""

    def __init__(self, pool: DialoguePool, encoder: TurnEncoder, limits: EpisodeLimits) -> None:
        self.pool, self.encoder, self.limits = pool, encoder, limits
        self._waiting: deque[tuple[Prompt, Rollout]] = deque()
        self._by_seat: dict[int, _OpenEpisode] = {}
        self._by_rollout: dict[int, _OpenEpisode] = {}
        self._read_turn: ReadTurn | None = None

    @property
    def is_busy(self) -> bool:
        """Whether some conversation goes on, or waits for a process."""
        return bool(self._waiting or self._by_seat)

    def begin(self, groups: Iterable[Group]) -> None:
        """Conversations of all completions, as many at once as there are processes."""
        self._waiting.extend((group.prompt, rollout) for group in groups for rollout in group.rollouts)
        self._begin_waiting()

    def ready(self, *, wait: bool) -> list[Rollout]:
        """Completions of which another turn is to be drawn. wait: until there is one, or no conversation goes on; all
        of them are the environments' turn then.

        Raises EpisodeError, which names the sample, and DataError for a prompt that is too long.
        """
        while self.is_busy:
            taken = [self._taken(self._by_seat[id(seat)], answer) for seat, answer in self.pool.poll(wait=wait)]
            self._begin_waiting()
            rollouts = [rollout for rollout in taken if rollout is not None]
            if rollouts or not wait:
                return rollouts
        return []

    def end_turn(self, rollout: Rollout, finish: Finish) -> None:
        """The model has ended its turn (stop), or the completion has reached its longest (length)."""
        opened = self._by_rollout[id(rollout)]
        assert opened.conversation is not None
        message = opened.conversation.read(rollout.tokens[opened.start :])
        if finish == "stop" and not opened.conversation.is_last:
            opened.seat.ask({"reply": message})
        else:
            self._end(opened, finish)

    def close(self) -> None:
        self.pool.close()

    # -- the environment's turns ----------------------------------------------------------------------

    def _begin_waiting(self) -> None:
        while self._waiting and (seat := self.pool.take()) is not None:
            prompt, rollout = self._waiting.popleft()
            self._by_seat[id(seat)] = self._by_rollout[id(rollout)] = _OpenEpisode(prompt, rollout, seat)
            seat.ask({"begin": {"prompt": prompt.content, **prompt.columns}})

    def _taken(self, opened: _OpenEpisode, answer: Answer) -> Rollout | None:
        """The completion if the model continues it."""
        if "error" in answer:
            self._fail(opened, str(answer["error"]))
            return None
        if opened.conversation is None:
            self._begun(opened, answer)
            return opened.rollout
        reply, rollout = Reply(**answer), opened.rollout
        assert rollout.episode is not None
        rollout.episode.add(reply.reward, reply.metrics)
        if opened.finish is not None or not reply.messages:
            self._finish(opened, opened.finish or "stop")
            return None
        return rollout if self._continued(opened, reply) else None

    def _begun(self, opened: _OpenEpisode, answer: Answer) -> None:
        tools = answer["tools"]
        conversation = TokenConversation(
            answer["prompt"], tools, self.encoder, self._reader() if tools else plain_turn, self.limits.max_turns
        )
        length, limits = len(conversation.prompt_ids), self.limits
        if length + limits.most > limits.positions + 1:
            raise DataError(
                f"{opened.prompt.where}: the prompt has {length} tokens with what its environment adds, with "
                f"rl.max_completion_length={limits.most} more than data.seq_length={limits.positions} positions hold; "
                "raise the latter, or lower rl.max_completion_length"
            )
        opened.conversation = conversation
        opened.rollout.episode = EpisodeRecord(conversation.prompt_ids, conversation.prompt, conversation.messages)

    def _continued(self, opened: _OpenEpisode, reply: Reply) -> bool:
        """Adds the environment's turn, unless the completion is too long with it."""
        rollout, conversation = opened.rollout, opened.conversation
        assert conversation is not None
        added = conversation.continued(rollout.tokens[opened.start :], reply).token_ids
        if len(rollout.tokens) + len(added) >= self.limits.most:
            del conversation.messages[-len(reply.messages) :]
            self._end(opened, "length")
            return False
        rollout.add_given(added)
        opened.start = len(rollout.tokens)
        return True

    def _reader(self) -> ReadTurn:
        if self._read_turn is None:
            self._read_turn = turn_reader(self.encoder.template.source)
        return self._read_turn

    # -- ends -----------------------------------------------------------------------------------------

    def _end(self, opened: _OpenEpisode, finish: Finish) -> None:
        opened.finish = finish
        opened.seat.ask({"end": True})

    def _finish(self, opened: _OpenEpisode, finish: Finish) -> None:
        opened.rollout.finish = finish
        del self._by_seat[id(opened.seat)], self._by_rollout[id(opened.rollout)]
        self.pool.give_back(opened.seat)

    def _fail(self, opened: _OpenEpisode, reason: str) -> None:
        """Raises EpisodeError, or leaves the completion out."""
        error = EpisodeError(f"{opened.prompt.where}: the environment {reason}")
        if not self.limits.skip_failures or not opened.rollout.tokens:
            raise error
        log.warning("left out: %s", error)
        self._finish(opened, "error")

"""A process that generates: `python -m mt_tune.rl.generators.process CHANNEL PARENT`.

CHANNEL: descriptor of a socket to the process of training that has started this one, its PARENT, which sends a
`GeneratorSetup` and then one message after another, each of which is answered. It ends when that process has ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from mt_core.config.loading import config_from_dict
from mt_core.data import building
from mt_core.errors import MtError
from mt_core.launch.process_group import BACKENDS
from mt_core.plugins import load_plugins
from mt_core.train import build
from mt_core.train.pipelining import build_stages
from mt_infer.text import TextGenerator
from mt_tune.rl.drawing import Drawer, with_cache_for
from mt_tune.rl.episode_config import configured_episodes
from mt_tune.rl.generators.messages import Answer, Connect, Draw, GeneratorSetup, Message, NewWeights, Ready
from mt_tune.rl.generators.weight_transfer import WeightReceiver, join_transfer, slices_of
from mt_tune.rl.weight_hashes import module_fragments, module_hashes

T = TypeVar("T")
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
PARENT_POLL_SECONDS = 0.5


def main() -> None:
    channel, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    # Training alone prints results.
    os.dup2(STANDARD_ERROR, STANDARD_OUTPUT)
    try:
        setup: GeneratorSetup = channel.recv()
        sys.path[:] = [*setup.path, *(entry for entry in sys.path if entry not in setup.path)]
        generator = answered(channel, partial(Generator, setup), lambda built: Answer(ready=built.ready()))
        while generator is not None:
            answered(channel, partial(generator.answer, channel.recv()), lambda answer: answer)
    except (EOFError, OSError):
        # Training has closed the channel, or has ended.
        os._exit(0)


def end_with(parent: int) -> None:
    """Ends this process when its parent has ended, also in the middle of a round."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def answered(channel: Connection, act: Callable[[], T], answer_of: Callable[[T], Answer]) -> T | None:
    """What `act` returns, after an answer to the process that trains; None where it has raised, which is the answer."""
    try:
        value: T | None = act()
        answer = answer_of(cast(T, value))
    except Exception as error:
        value, answer = None, Answer(error=sendable(error))
    channel.send(answer)
    return value


def sendable(error: Exception) -> Exception:
    """The error, or one of mt's with its words: not all others can be pickled."""
    if isinstance(error, MtError):
        return error
    traceback.print_exception(error)
    return RuntimeError(f"a process that generates failed: {type(error).__name__}: {error}")


class Generator:
    """The model in the layout that generates, as one process of it."""

    def __init__(self, setup: GeneratorSetup) -> None:
        self.setup, self.device = setup, torch.device(setup.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.store = dist.TCPStore(setup.address, setup.port, is_master=False)
        self._join_world()
        host = load_plugins()
        config = config_from_dict(setup.config, host)
        if config.train.num_threads is not None:
            torch.set_num_threads(config.train.num_threads)
        tokenizer = building.build_tokenizer(config, host)
        self.ctx = build.build_context(config, self.device)
        stages = build_stages(config, self.ctx, host)
        self.model = build.build_model(config, self.ctx, host, None if stages is None else stages.own)
        self.model.eval()
        self.receiver: WeightReceiver | None = None
        positions: Any = self.model.max_sequence_length
        text = TextGenerator.of_model(
            self.model, tokenizer, with_cache_for(config, setup.most, positions), self.ctx, stages
        )
        episodes = configured_episodes(config, tokenizer, host) if setup.rank == 0 else None
        self.drawer = Drawer(text, self.ctx.world, setup.version, episodes)

    def _join_world(self) -> None:
        if self.setup.size > 1:
            dist.init_process_group(
                BACKENDS[self.device.type],
                store=dist.PrefixStore("generators", self.store),
                rank=self.setup.rank,
                world_size=self.setup.size,
                timeout=timedelta(seconds=self.setup.timeout_seconds),
                device_id=self.device if self.device.type == "cuda" else None,
            )

    def ready(self) -> Ready:
        fragments = module_fragments(self.model, self.ctx)
        return Ready(slices_of(fragments), {name: parameter.dtype for name, parameter in self.model.named_parameters()})

    def answer(self, message: Message) -> Answer:
        if isinstance(message, Connect):
            return self._connect(message)
        if isinstance(message, NewWeights):
            return self._receive(message.version)
        assert isinstance(message, Draw)
        self.drawer.draw(message.groups, message.options, message.until)
        return Answer(rollouts=[group.rollouts for group in message.groups])

    def _connect(self, connect: Connect) -> Answer:
        rank, size = self.setup.trainers + self.setup.rank, self.setup.trainers + self.setup.size
        group = join_transfer(self.store, rank, size, self.device, self.setup.timeout_seconds)
        self.receiver = WeightReceiver(self.model, self.ctx, connect, group)
        return Answer()

    def _receive(self, version: int) -> Answer:
        assert self.receiver is not None
        # Ends what was cancelled, and forgets what was computed with other weights.
        self.drawer.lockstep.weights_changed()
        self.receiver.receive()
        self.drawer.version = version
        self.drawer.routing.forget()
        return Answer(hashes=module_hashes(self.model, self.ctx))


if __name__ == "__main__":
    main()

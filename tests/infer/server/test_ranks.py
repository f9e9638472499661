"""The engine's thread over two ranks: requests, and the time between them."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.infer.server.served import LLAMA, configuration

from mt_core.nn.layout import initialize
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import build
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server import engine_thread
from mt_infer.server.engine_thread import EngineThread
from mt_infer.server.options import ServerOptions
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import Service
from mt_infer.text import TextGenerator

pytestmark = [pytest.mark.dist, pytest.mark.slow]
GREEDY = SamplingParameters(temperature=0.0, max_tokens=6)


def on_rank(rank: int, world: int) -> tuple[list[list[int]], int, set[str]] | None:
    config = configuration(LLAMA)
    ctx = build.build_context(config, torch.device("cpu"))
    model = build.build_model(config, ctx, load_plugins())
    initialize(model, 1, ctx)
    generator = TextGenerator.of_model(model.eval(), ByteLevelTokenizer(), config, ctx)
    if rank:
        return generator.follow()
    engine_thread.HEARTBEAT_SECONDS = 0.1
    found = asyncio.run(requests_with_a_pause(generator))
    generator.close()
    return found


async def requests_with_a_pause(generator: TextGenerator) -> tuple[list[list[int]], int, set[str]]:
    """Tokens of four requests to two replicas, before and after a pause; steps of the pause; the gauges' values."""
    service = Service([ServedModel("tiny", 0, generator)], ServerOptions())
    steps = count_steps(generator)
    thread: EngineThread = service.engine
    thread.start()
    gauges: set[str] = set()
    before = await tokens(service, 4, gauges)
    done = len(steps)
    await asyncio.sleep(1.0)
    paused = len(steps) - done
    after = await tokens(service, 4, gauges)
    await asyncio.to_thread(thread.stop)
    assert before == after
    return before, paused, gauges


async def tokens(service: Service, count: int, gauges: set[str]) -> list[list[int]]:
    """Of `count` requests. gauges: gets the lines of /metrics about running sequences."""
    found: list[list[int]] = [[] for _ in range(count)]
    prompts = [[65 + number, 66] for number in range(count)]
    async for place, event in service.generate(service.models.find(None), prompts, GREEDY):
        if event.token is not None:
            found[place].append(event.token)
        lines = service.metrics.exposition().decode().splitlines()
        gauges |= {line for line in lines if line.startswith("mt_sequences_running{")}
    return found


def count_steps(generator: TextGenerator) -> list[None]:
    steps: list[None] = []
    step = generator.step

    def counted():
        steps.append(None)
        return step()

    generator.step = counted
    return steps


@pytest.mark.long
def test_two_replicas_share_requests_and_idle_in_step() -> None:
    from tests.infer.server.served import generator

    found, paused, gauges = run_ranks(2, on_rank)[0]
    alone = generator(1).generate([[65 + number, 66] for number in range(4)], GREEDY)
    assert found == [one[0].tokens for one in alone]
    assert 1 <= paused < 100  # heartbeats, and no loop that turns
    running = 'mt_sequences_running{{model="tiny",replica="{}"}} {}'
    assert {running.format(replica, count) for replica in (0, 1) for count in ("0.0", "2.0")} <= gauges

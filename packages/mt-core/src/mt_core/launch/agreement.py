"""Compares values that the ranks of a run were started with, through the rendezvous store.

Collectives cannot do it: ranks that were started with different layouts call different ones, and wait for ever.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from mt_core._torch_compat import default_store
from mt_core.errors import ConfigError, TrainingError

SHOWN_KEYS, SHOWN_RANKS = 8, 64
SHOWN_CHARACTERS = 200
VALUES, DIGEST, DIFFERENCES, DONE, ALL_DONE = "values", "digest", "differences", "done", "all-done"


class Difference(NamedTuple):
    """What one rank has otherwise than rank 0. keys: the first of them, each with the values of rank 0 and of `rank`,
    as text. all_keys: the number of them."""

    rank: int
    host: str
    first_host: str
    keys: list[tuple[str, str, str]]
    all_keys: int


def require_agreement(topic: str, values: Mapping[str, Any], *, timeout: float) -> None:
    """Raise ConfigError on every rank unless each key that two ranks have, has one value.

    topic: what the values are, for the message and as a part of the store's keys. values: of this rank, to be written
    as JSON; a message names the first key that differs in their order. Every rank of the world calls it, in the same
    order of topics. TrainingError names the ranks that did not call it within `timeout` seconds. A single process has
    nobody to compare with.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    store = _own_part(default_store(), topic, rank)
    _publish_difference(store, values, rank)
    # The last rank releases all: each waits for one key, not for world_size keys. None goes on into a collective
    # before the differences of all ranks are known.
    store.set(f"{DONE}/{rank}", "")
    if store.add(DONE, 1) == world:
        store.set(ALL_DONE, "")
    _wait(store, world, topic, timeout)
    if differences := _read_differences(store):
        raise ConfigError(_message(topic, differences, world))


def any_rank_differs(topic: str, value: str, *, timeout: float) -> bool:
    """Whether the ranks have different values. Called as `require_agreement`."""
    try:
        require_agreement(topic, {topic: value}, timeout=timeout)
    except ConfigError:
        return True
    return False


def _own_part(store: dist.Store, topic: str, rank: int) -> dist.Store:
    """A part of the store for this comparison: programs may compare a topic several times."""
    return dist.PrefixStore(f"agreement/{topic}/{store.add(f'agreement/{topic}/{rank}', 1)}", store)


def _publish_difference(store: dist.Store, values: Mapping[str, Any], rank: int) -> None:
    text = json.dumps(values, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if rank == 0:
        store.set(VALUES, json.dumps([socket.gethostname(), values], default=str))
        store.set(DIGEST, digest)
        return
    # Ranks that agree read 64 characters, not the values: rank 0's node serves them to all ranks.
    if store.get(DIGEST).decode() == digest:
        return
    first_host, first = json.loads(store.get(VALUES))
    local_values = json.loads(text)
    keys = [
        (key, first[key], local_values[key]) for key in first if key in local_values and first[key] != local_values[key]
    ]
    if keys:
        shown = [(key, _short(there), _short(here)) for key, there, here in keys[:SHOWN_KEYS]]
        difference = Difference(rank, socket.gethostname(), first_host, shown, len(keys))
        store.set(f"{DIFFERENCES}/{store.add(DIFFERENCES, 1)}", json.dumps(difference))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _wait(store: dist.Store, world: int, topic: str, timeout: float) -> None:
    try:
        store.wait([ALL_DONE], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        missing = [rank for rank in range(world) if not store.check([f"{DONE}/{rank}"])]
        raise TrainingError(
            f"{len(missing)} of {world} ranks did not compare their {topic} within {timeout:g} s: "
            f"{', '.join(map(str, missing[:SHOWN_RANKS]))}"
        ) from error


def _read_differences(store: dist.Store) -> list[Difference]:
    count = min(store.add(DIFFERENCES, 0), SHOWN_RANKS)
    differences = [Difference(*json.loads(store.get(f"{DIFFERENCES}/{number}"))) for number in range(1, count + 1)]
    return sorted(differences)  # by rank: which rank wrote first is chance


def _message(topic: str, differences: list[Difference], world: int) -> str:
    first = differences[0]
    lines = [
        f"  {key}: {there} on {first.first_host} (rank 0), {here} on {first.host} (rank {first.rank})"
        for key, there, here in first.keys
    ]
    if first.all_keys > len(first.keys):
        lines.append(f"  and {first.all_keys - len(first.keys)} more")
    return "\n".join(
        [
            f"the ranks of this run differ in their {topic}:",
            *lines,
            f"{_ranks(differences)} of {world} {'differs' if len(differences) == 1 else 'differ'} from rank 0. Start "
            "every node with the same files, options, packages and code; docs/guides/launching.md lists what may "
            "differ",
        ]
    )


def _ranks(differences: Iterable[Difference]) -> str:
    numbers = [difference.rank for difference in differences]
    more = " and more" if len(numbers) == SHOWN_RANKS else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}{more}"

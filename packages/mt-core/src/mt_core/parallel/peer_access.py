"""Whether GPUs read and write one another's memory, as products overlapped with collectives do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch


def peer_access_objection(ranks: Sequence[int], ranks_of_host: int) -> str | None:
    """Why the GPUs of these ranks cannot read one another's memory; None if they can.

    ranks_of_host: of the world on each host, which are consecutive and have a GPU each.
    """
    # torchrun's numbering: rank = host * ranks_of_host + local rank, and local rank i uses GPU i.
    hosts = {rank // ranks_of_host for rank in ranks}
    if len(hosts) > 1:
        return f"ranks {', '.join(map(str, ranks))} are on {len(hosts)} hosts, and memory is shared inside one host"
    devices = [rank % ranks_of_host for rank in ranks]
    for reader, owner in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(reader, owner):
            return f"GPU {reader} has no peer access to the memory of GPU {owner}"
    return None

"""Messages between training and the processes in which the user's code runs: pickled to them, JSON from them, so that
nothing that such code has touched is unpickled by training.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from collections.abc import Mapping
from typing import Any

LENGTH = struct.Struct("<Q")
"""Before each message: its bytes."""
LONGEST_REPLY = 256 << 20


class Channel:
    """The end of training. Replies arrive in parts, so that several processes can be waited for."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray()

    def send(self, message: object) -> None:
        """Raises OSError where the process has ended, and what pickle raises."""
        body = pickle.dumps(message)
        self.socket.sendall(LENGTH.pack(len(body)) + body)

    def receive(self) -> bool:
        """Takes bytes; False where the process has closed the channel, or sends too much."""
        try:
            part = self.socket.recv(1 << 20)
        except ConnectionError:
            return False
        self._buffer += part
        return bool(part) and not self.is_too_long

    @property
    def is_too_long(self) -> bool:
        return len(self._buffer) > LONGEST_REPLY

    def message(self) -> Any:
        """The message if all of it is there; None before."""
        if len(self._buffer) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return json.loads(body)

    def close(self) -> None:
        self.socket.close()


# -- the end of the process --------------------------------------------------------------------------


def received(channel: socket.socket) -> Any:
    """The next object of training; None where it has closed the channel."""
    head = _bytes(channel, LENGTH.size)
    body = head and _bytes(channel, LENGTH.unpack(head)[0])
    return pickle.loads(body) if body else None


def send_json(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """What is no JSON is sent as text. Ends the process where training has closed the channel: nobody asks any more."""
    body = json.dumps(message, default=str).encode()
    try:
        channel.sendall(LENGTH.pack(len(body)) + body)
    except ConnectionError:
        raise SystemExit(0) from None


def _bytes(channel: socket.socket, count: int) -> bytes:
    """Exactly so many; empty at the end of the stream."""
    parts: list[bytes] = []
    while count:
        try:
            part = channel.recv(min(count, 1 << 20))
        except ConnectionError:
            return b""
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)

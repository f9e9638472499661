"""Responses that are kept for later ones: previous_response_id of /v1/responses."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mt_infer.server.errors import ApiError
from mt_infer.server.openai.answers import Piece
from mt_infer.server.openai.messages import Message

MOST_STORED = 1000
"""Responses that a server keeps; the oldest is forgotten first."""


@dataclass(frozen=True)
class Stored:
    """A response and the conversation up to its end, without instructions, which are of one response."""

    response: Piece
    messages: tuple[Message, ...]


class StoredResponses:
    """The last responses, by their ids, in memory: they end with the server."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Stored] = OrderedDict()

    def add(self, stored: Stored) -> None:
        self._by_id[stored.response["id"]] = stored
        if len(self._by_id) > MOST_STORED:
            self._by_id.popitem(last=False)

    def find(self, number: str, param: str | None = None) -> Stored:
        """Raises ApiError."""
        if number not in self._by_id:
            raise ApiError(
                f'there is no response "{number[:100]}"; this server keeps the last {MOST_STORED} that were made with '
                "store=true",
                status=404,
                param=param,
                code="not_found",
            )
        return self._by_id[number]

    def remove(self, number: str) -> Piece:
        self.find(number)
        del self._by_id[number]
        return {"id": number, "object": "response.deleted", "deleted": True}

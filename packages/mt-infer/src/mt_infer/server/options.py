"""What an operator decides about a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerOptions:
    """Limits of a server. Each is an error object for the client that exceeds it.

    api_key: what requests must bring; None: nothing. any_host: whether requests may name any Host (else those of this
    machine only, so that a web page cannot reach the server through a name of its own).
    """

    api_key: str | None = None
    any_host: bool = False
    max_body_bytes: int = 8 << 20
    max_files_bytes: int = 1 << 30
    """Bytes of all files of batches together."""
    max_tokens: int | None = None
    """Tokens that a request may generate; None: as many as the model's context has."""
    max_queue: int = 1024
    """Sequences that run or wait."""
    request_seconds: float = 600.0
    adapter_folder: Path | None = None
    """The folder whose adapters requests may load; None: requests load none."""
    media_folders: tuple[Path, ...] = ()
    """Folders whose images requests may name by file: URLs."""

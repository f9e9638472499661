"""A chat template, rendered in another process within a time limit."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from mt_core.errors import DataError

COMMAND = (sys.executable, "-m", "mt_infer.chat.template_worker")
START_SECONDS = 60.0
"""For the process to start, which is slow on a busy machine; rendering has its own limit."""


class TemplateProcess:
    """Renders one template. Calls of several threads take turns. Ended when it takes longer than `seconds`, and started
    again at the next call."""

    def __init__(self, source: str, name: str, *, seconds: float = 5.0) -> None:
        self.source, self.name, self.seconds = source, name, seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text. Raises DataError for a template that refuses the values, is not valid, or takes too long."""
        with self._lock:
            if self._process is None:
                self._start()
            return self._exchange(values, self.seconds)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> None:
        # The protocol is JSON lines: no object of the template's process is unpickled here.
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._exchange({"source": self.source, "name": self.name}, START_SECONDS)
        except DataError:
            self._end()
            raise

    def _exchange(self, message: Mapping[str, Any], seconds: float) -> str:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            # One request at a time, so that the next line out is its reply.
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            reply = json.loads(self._line(process, seconds))
        except TimeoutError:
            self._end()
            raise DataError(f"{self.name} took longer than {seconds:g} s on these messages and was ended") from None
        except (OSError, ValueError):
            self._end()
            raise DataError(f"{self.name} ended its process on these messages; it may need too much memory") from None
        if "error" in reply:
            raise DataError(reply["error"])
        return reply["text"]

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """One line of the process; empty when it has ended. Raises TimeoutError."""
        assert process.stdout is not None
        parts: list[bytes] = []
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            # A reply has no other newline: JSON escapes them.
            while not parts or not parts[-1].endswith(b"\n"):
                if not selector.select(max(end - time.monotonic(), 0)):
                    raise TimeoutError
                parts.append(os.read(process.stdout.fileno(), 1 << 16))
                # End of file: the process has died, for instance of its memory limit.
                if not parts[-1]:
                    break
        return b"".join(parts)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # wait() after the kill: else the process would stay as a zombie.
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

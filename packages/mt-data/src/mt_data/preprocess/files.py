"""Small files that are whole or not there, and locks that end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import IO

from mt_core.errors import ConfigError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Some network file systems are mounted without locks."""


def refuse_remote_output(option: str, output: str | Path) -> None:
    """ConfigError for an address of an object store (also one that became a path, which has a slash less)."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(output)):
        raise ConfigError(
            f"{option} {output}: outputs are written to files, since what is done is kept there until all is; give a "
            "path, and copy them to the store when they are there"
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write, put on the disk, and only then give the file its name."""
    # The process id keeps writers of the same name apart, so that neither renames a file that the other is still
    # writing.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def try_lock(file: IO[str], *, shared: bool = False, wait_seconds: float = 0) -> bool:
    """Lock an open file, trying for `wait_seconds`; False when another process keeps it locked."""
    deadline = time.monotonic() + wait_seconds
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            # flock and not lockf: the lock belongs to the open file, and is not lost when this process closes another
            # descriptor of the same file. It ends with the last descriptor, so also with a killed process.
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            # Polled, since flock has no time-out.
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return True

"""Limits this process, and becomes the Python program that is named. Run as a script, it imports nothing of mt.

Arguments: seconds of the CPU, megabytes of address space, megabytes of a file, the program.
"""

import os
import resource
import sys


def main() -> None:
    seconds, memory_mb, file_mb = map(int, sys.argv[1:4])
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        # The hard limit too: the program cannot raise it.
        resource.setrlimit(limit, (value, value))
    # The limits stay over exec, which leaves nothing of this script in the program's memory.
    os.execv(sys.executable, [sys.executable, "-I", sys.argv[4]])


if __name__ == "__main__":
    main()

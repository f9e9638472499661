"""Runs a Python program that a model wrote within limits. Run as a script, it imports nothing of mt.

    limited_process.py watch SECONDS MEMORY_MB FILE_MB PROCESSES ISOLATED PROGRAM SECRET END EXCESS
    limited_process.py run PROGRAM SECRET END

`watch` is the first process of the program's namespaces (ISOLATED 1), starts `run` in them with the limits of one
process, and ends when the program does, or when its processes exceed the limits in total: it writes which one to the
descriptor EXCESS, which the program does not have, and the kernel ends all.
`run` executes the program, and after it copies the secret from the descriptor SECRET to the descriptor END.
"""

import os
import sys

NAMESPACE_INIT = 1
"""Process id of the first process of a PID namespace."""
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
MS_NOSUID, MS_NODEV, MS_BIND = 2, 4, 4096
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, CAPABILITIES = 24, 38, 64
INODES = 4096
NICE = 19
"""Niceness of the program: this script has to run beside more processes than there may be."""
LEAST_PID_MAX = "301"
"""The least that Linux takes."""
OWN_PROCESSES = 3
"""Processes of this script and unshare; one more than the limit, so that this script sees the excess."""
SHARED_MEMORY = "/dev/shm"
SECRET_BYTES = 64


def watch(arguments: "list[str]") -> int:
    """The exit status of the program, or 1 if it was ended."""
    seconds, memory_mb, file_mb, processes, isolated = map(int, arguments[:5])
    program, (secret, end, excess) = arguments[5], map(int, arguments[6:9])
    os.set_inheritable(excess, False)
    folder = os.getcwd()
    if isolated:
        _bound_process_numbers()
        _allow_files_only_in(folder, file_mb)
        os.chdir(folder)  # into what is mounted there
    child = os.fork()
    if child == 0:
        os.nice(NICE)
        _limit(seconds, memory_mb, file_mb)
        if isolated and _counts_by_namespace():
            _limit_processes(processes)
        os.set_inheritable(secret, True)
        os.set_inheritable(end, True)
        # A new program, so that it has no capabilities and nothing of this script in its memory.
        os.execve(sys.executable, [sys.executable, "-I", __file__, "run", program, str(secret), str(end)], {})
    os.close(secret)
    os.close(end)
    return _wait(child, memory_mb, processes, excess)


def run(program: str, secret: int, end: int) -> None:
    from types import ModuleType

    read, write = os.read, os.write  # the program may replace them
    # What is not imported by the program is not there, and dataclasses and pickle find __main__.
    main = ModuleType("__main__")
    main.__file__ = program
    sys.argv[:] = [program]
    sys.modules["__main__"] = main
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec")
    exec(code, main.__dict__)
    # Read only now: before, the secret is in no variable, no constant and no file.
    write(end, read(secret, SECRET_BYTES))


# -- limits of all processes -----------------------------------------------------------------------


def _wait(child: int, memory_mb: int, processes: int, descriptor: int) -> int:
    import time

    pause = 0.001
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            return os.waitstatus_to_exitcode(status) & 0xFF
        # Also behind each orphan, which the first process of a namespace inherits: there may be no end of them.
        if excess := _excess(memory_mb, processes):
            # Not among the errors of the program, whose other processes may write behind it until they end.
            os.write(descriptor, excess.encode())
            return 1
        if not ended:
            time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _excess(memory_mb: int, processes: int) -> "str | None":
    running = _processes()
    if len(running) > processes:
        return f"had more than {processes} processes"
    if sum(map(_memory_kb, running)) > memory_mb << 10:
        return f"used more than {memory_mb} MB of memory in all its processes"
    return None


def _processes() -> "list[int]":
    """All of the PID namespace, or of the session where there is none, without this one."""
    own_pid = os.getpid()
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own_pid]
    return numbers if own_pid == NAMESPACE_INIT else [number for number in numbers if _session(number) == os.getsid(0)]


def _session(process: int) -> int:
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return -1


def _memory_kb(process: int) -> int:
    """Its share of pages in memory (Pss): what several processes share is counted once."""
    try:
        with open(f"/proc/{process}/smaps_rollup", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"Pss:")), 0)
    except OSError:  # it has ended
        return 0


def _bound_process_numbers() -> None:
    """A program that starts processes without end takes those of its namespace alone: at most the kernel's reserve of
    numbers, until this script ends it. Before Linux 6.14 the numbers are those of the machine."""
    try:
        with open("/proc/sys/kernel/pid_max", "w") as file:
            file.write(LEAST_PID_MAX)
    except OSError:
        return


def _counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts the processes of a user namespace (Linux 5.14), and not all of the user."""
    return tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14)


def _limit_processes(processes: int) -> None:
    """For users other than root, to whom the kernel does not apply it."""
    import resource

    limit = processes + OWN_PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


# -- limits of one process -------------------------------------------------------------------------


def _limit(seconds: int, memory_mb: int, file_mb: int) -> None:
    import ctypes
    import resource

    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        # The hard limit too: the program cannot raise it.
        resource.setrlimit(limit, (value, value))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(CAPABILITIES):
        # The first process of a user namespace has all capabilities in it, such as to mount; fails without them.
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def _allow_files_only_in(folder: str, file_mb: int) -> None:
    """The file system read-only, but for a folder in memory of a limited size, which is /dev/shm too.

    Raises OSError where the kernel does not allow it (before Linux 5.12).
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    _require(ctypes, libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes)))
    options = f"size={file_mb}m,nr_inodes={INODES},mode=700".encode()
    _require(ctypes, libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options))
    if os.path.isdir(SHARED_MEMORY):
        _require(ctypes, libc.mount(os.fsencode(folder), SHARED_MEMORY.encode(), None, MS_BIND, None))


def _require(ctypes: "object", result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()  # type: ignore[attr-defined]
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        sys.exit(watch(sys.argv[2:]))
    run(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

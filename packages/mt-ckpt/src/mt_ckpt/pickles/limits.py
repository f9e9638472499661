"""Limits on what a pickle may describe, and on what its keys cost to hash and to compare.

The costs of keys are checked before anything in it is built.

The hash of a tuple is that of all within it, each time that it is computed (before Python 3.14), and two equal tuples
are compared throughout (in every version). Forty tuples, each holding the one before it twice, are a few hundred bytes;
as a key, loading them would not end.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, BinaryIO

from mt_ckpt.pickles.inert_objects import Inert
from mt_core.errors import CheckpointError

# -- size, so that a small file cannot ask for endless work ------------------------------------------
#
# A pickle names an object as often as it likes: thirty lists, each holding the one before it twice, are a billion
# entries to whoever walks through them, and a list may hold itself.

MAX_DEPTH = 200
"""Containers within containers. Checkpoints have about ten; Python's own functions fail at a thousand."""
FREE_ENTRIES = 1_000_000
ENTRIES_PER_ENTRY = 64
"""Walking through an object may meet so many times the entries that the pickle holds, and FREE_ENTRIES in any case."""
_LEAVES = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = (dict, list, tuple, set, frozenset, Inert)


def check_structure(value: Any, origin: str) -> None:
    """Raises CheckpointError for an object that contains itself, is nested too deeply, or is endless to walk through.

    origin: the file, for the message. Each container is looked at once, however often it is named.
    """
    if isinstance(value, _CONTAINERS):
        _Walk(origin).measure(value)


class _Walk:
    def __init__(self, origin: str) -> None:
        self._origin = origin
        # Ids are valid keys: `root` keeps every container alive during the walk.
        self._heights: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        """For each container done, by id: levels in it, and entries that a walk through it meets."""
        self._entries = 0

    def measure(self, root: Any) -> None:
        # Depth-first with a stack of its own: Python's recursion would end at about a thousand levels.
        path: list[tuple[Any, list[Any], Iterator[Any]]] = []
        on_path: set[int] = set()

        def enter(container: Any) -> None:
            # The limit on the way down; `_finish` repeats it for containers that were measured on another, shorter
            # path.
            if len(path) == MAX_DEPTH:
                raise self._refusal(f"is nested more than {MAX_DEPTH} levels deep")
            inner = _containers_in(container)
            if not inner:
                self._finish(container, inner)
                return
            path.append((container, inner, iter(inner)))
            on_path.add(id(container))

        enter(root)
        while path:
            container, inner, rest = path[-1]
            # A child that is done is not entered again, so the walk is linear in the number of containers. rest keeps
            # its position between two passes.
            child = next((child for child in rest if id(child) not in self._sizes), None)
            if child is None:
                path.pop()
                on_path.discard(id(container))
                self._finish(container, inner)
            elif id(child) in on_path:
                raise self._refusal("contains itself")
            else:
                enter(child)

    def _finish(self, container: Any, inner: list[Any]) -> None:
        count = 3 if isinstance(container, Inert) else len(container)
        self._entries += count
        height = 1 + max((self._heights[id(child)] for child in inner), default=0)
        # Entries with repetitions: may be exponential in the number of containers, which Python's integers hold.
        size = count + sum(self._sizes[id(child)] for child in inner)
        if height > MAX_DEPTH:
            raise self._refusal(f"is nested more than {MAX_DEPTH} levels deep")
        if size > FREE_ENTRIES + ENTRIES_PER_ENTRY * self._entries:
            raise self._refusal(f"repeats {self._entries} entries until they are {size:.2g}")
        self._heights[id(container)], self._sizes[id(container)] = height, size

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._origin}: refused: the object in it {what}, which no checkpoint does")


def _containers_in(container: Any) -> list[Any]:
    entries: Iterable[Any] = container
    if isinstance(container, Inert):
        entries = (container.arguments, container.attributes, container.items)
    elif isinstance(container, dict):
        entries = chain(container, container.values())
    # Most entries are of these types, which are found without a search through the kinds of containers.
    return [entry for entry in entries if type(entry) not in _LEAVES and isinstance(entry, _CONTAINERS)]


_CONSTANT = 0
"""The number of every object that holds no others."""
_TUPLES = ("TUPLE1", "TUPLE2", "TUPLE3", "TUPLE")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_KEYS = {
    "SETITEM": slice(1, None, 2),
    "SETITEMS": slice(1, None, 2),
    "DICT": slice(0, None, 2),
    "ADDITEMS": slice(1, None),
    "FROZENSET": slice(0, None),
    "REDUCE": slice(1, None),
}
"""Opcode -> which of the objects that it takes are hashed. What a call makes may be a set of its arguments."""
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""How pickletools marks an argument whose length stands before it -> bytes of that length."""


@dataclass(frozen=True, slots=True)
class _Opcode:
    """What one byte of a pickle does. It is looked up for every one of them, which is why everything is decided here.

    num_bytes: of the argument; of one that is not fixed None, and then either length_bytes, those of the length before
    it, or lines. constants: what is added to the stack by an opcode that takes nothing from it and makes one object
    without others. takes: how many objects are taken from the stack; of `marked` opcodes below the mark.
    """

    name: str
    num_bytes: int | None
    length_bytes: int
    lines: int
    constants: list[int] | None
    marked: bool
    takes: int
    makes: bool
    is_get: bool
    is_put: bool
    is_tuple: bool
    fills: bool
    keys: slice | None

    def long_argument(self, stream: BinaryIO) -> bytes:
        """The argument if its length is not fixed."""
        if self.length_bytes:
            return stream.read(int.from_bytes(stream.read(self.length_bytes), "little"))
        return b"".join(stream.readline() for _ in range(self.lines))

    def number(self, argument: bytes) -> int:
        """The number of an entry of the memo: decimal digits in a line, or little-endian."""
        return int(argument) if self.num_bytes is None else int.from_bytes(argument, "little")


def _described(opcode: pickletools.OpcodeInfo) -> _Opcode:
    name, before = opcode.name, opcode.stack_before
    length = opcode.arg.n if opcode.arg else 0
    is_get, is_put = name.endswith("GET"), name.endswith("PUT")
    # GLOBAL and PERSID of protocol 0 are constants too, which take nothing.
    is_constant = not (before or name.startswith("EMPTY_") or name == "MARK" or is_get or is_put)
    # stack_before lists what is below the mark (a list for APPENDS), the mark, and "stackslice" for all above it.
    marked = pickletools.markobject in before
    return _Opcode(
        name,
        num_bytes=length if length >= 0 else None,
        length_bytes=_LENGTH_BYTES.get(length, 0),
        lines=2 if name in ("GLOBAL", "INST") else 1,
        constants=[_CONSTANT] * len(opcode.stack_after) if is_constant else None,
        marked=marked,
        takes=before.index(pickletools.markobject) if marked else len(before),
        makes=bool(opcode.stack_after),
        is_get=is_get,
        is_put=is_put,
        is_tuple=name in _TUPLES,
        fills=name in _FILLS,
        keys=_KEYS.get(name),
    )


_OPCODES = {opcode.code.encode("latin-1"): _described(opcode) for opcode in pickletools.opcodes}


def check_hash_costs(stream: BinaryIO, origin: str) -> None:
    """Look through the pickle at the position of `stream`, which stays there.

    Raises CheckpointError when a tuple, or all keys together, have far more entries within them than the pickle has
    opcodes. A damaged pickle is left to the unpickler, which says what is wrong.
    """
    begin = stream.tell()
    try:
        _CostMachine(origin).run(stream)
    # The machine fails on a damaged pickle in these ways. What is refused is raised as CheckpointError.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError):
        pass
    finally:
        stream.seek(begin)


@dataclass
class _CostMachine:
    """The stack machine of pickle, with entries to walk through in the place of objects.

    stack, memo: numbers of objects, whose costs are in `costs`, so that what is put into a list later counts wherever
    the list is named. marks: lengths of the stack. hashed: the cost of all keys so far.
    """

    origin: str
    hashed: int = 0
    # By the number of an object; 0 is _CONSTANT, of cost 1.
    costs: list[int] = field(default_factory=lambda: [1])
    stack: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, int] = field(default_factory=dict)

    def run(self, stream: BinaryIO) -> None:
        """Every opcode up to STOP. Raises KeyError where the pickle ends before."""
        read, stack = stream.read, self.stack
        for done in count():
            opcode = _OPCODES[read(1)]
            num_bytes = opcode.num_bytes
            argument = opcode.long_argument(stream) if num_bytes is None else read(num_bytes)
            # Most opcodes of a checkpoint are constants.
            if opcode.constants is not None:
                stack += opcode.constants
            # GET, BINGET, LONG_BINGET; the same for PUT. The memo gives the object again, so that repetition is
            # counted.
            elif opcode.is_get:
                stack.append(self.memo[opcode.number(argument)])
            elif opcode.is_put:
                self.memo[opcode.number(argument)] = stack[-1]
            elif opcode.name == "MARK":
                self.marks.append(len(stack))
            elif opcode.name == "STOP":
                return
            else:
                self._step(opcode, done)

    def _step(self, opcode: _Opcode, done: int) -> None:
        """An opcode that takes objects, behind `done` others."""
        if opcode.name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif opcode.name == "DUP":
            self.stack.append(self.stack[-1])
        # POP removes the mark if nothing is above it: so protocol 0 gives up a tuple that contains itself.
        elif opcode.name == "POP" and self.marks[-1:] == [len(self.stack)]:
            self.marks.pop()
        else:
            self._make(opcode, self._pop(opcode), done)

    def _make(self, opcode: _Opcode, taken: list[int], done: int) -> None:
        costs = [self.costs[number] for number in taken]
        cost = 1 + sum(costs)
        if opcode.is_tuple:
            self._limit(cost, done)
        elif opcode.keys is not None:
            self.hashed += sum(costs[opcode.keys])
            self._limit(self.hashed, done)
        # The container stays the same object with a larger cost; others make a new one.
        if opcode.fills:
            self.costs[taken[0]] = cost
            self.stack.append(taken[0])
        elif opcode.makes:
            self.stack.append(len(self.costs))
            self.costs.append(cost)

    def _limit(self, cost: int, done: int) -> None:
        # Linear in the length of the pickle: a genuine checkpoint repeats its entries a few times at most.
        if cost > FREE_ENTRIES + ENTRIES_PER_ENTRY * done:
            raise CheckpointError(
                f"{self.origin}: refused: the object in it has keys or tuples that repeat {done} entries until they "
                f"are {cost:.2g}, which no checkpoint does"
            )

    def _pop(self, opcode: _Opcode) -> list[int]:
        """The objects that an opcode takes; what stands above the last mark is one of its operands."""
        end = self.marks.pop() if opcode.marked else len(self.stack)
        first = end - opcode.takes
        taken = self.stack[first:]
        del self.stack[first:]
        return taken

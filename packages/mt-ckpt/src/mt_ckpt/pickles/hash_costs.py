"""A limit on what the keys in a pickle cost to hash and to compare, checked before anything in it is built.

The hash of a tuple is that of all within it, each time that it is computed (before Python 3.14), and two equal tuples
are compared throughout (in every version). Forty tuples, each holding the one before it twice, are a few hundred bytes;
as a key, loading them would not end.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mt_ckpt.pickles.structure import ENTRIES_PER_ENTRY, FREE_ENTRIES
from mt_core.errors import CheckpointError

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
_GETS = frozenset(opcode.name for opcode in pickletools.opcodes if opcode.name.endswith("GET"))
_PUTS = frozenset(opcode.name for opcode in pickletools.opcodes if opcode.name.endswith("PUT"))
_CONSTANTS = {
    opcode.name: [_CONSTANT] * len(opcode.stack_after)
    for opcode in pickletools.opcodes
    if not (opcode.stack_before or opcode.name.startswith("EMPTY_") or opcode.name in {"MARK", *_GETS, *_PUTS})
}
"""Opcode -> what it adds to the stack: GLOBAL and PERSID of protocol 0 too, which take nothing from it."""
_MARKS = {
    opcode.name: opcode.stack_before.index(pickletools.markobject)
    for opcode in pickletools.opcodes
    if pickletools.markobject in opcode.stack_before
}
"""Opcode -> how many objects it takes below the mark. stack_before lists these (a list for APPENDS), the mark, and
"stackslice" for all above it."""


def check_hash_costs(stream: BinaryIO, origin: str) -> None:
    """Look through the pickle at the position of `stream`, which stays there.

    Raises CheckpointError when a tuple, or all keys together, have far more entries within them than the pickle has
    opcodes. A damaged pickle is left to the unpickler, which says what is wrong.
    """
    machine, begin = _CostMachine(), stream.tell()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            machine.run(opcode, argument)
            # Linear in the length of the pickle: a genuine checkpoint repeats its entries a few times at most.
            if machine.largest > FREE_ENTRIES + ENTRIES_PER_ENTRY * count:
                raise CheckpointError(
                    f"{origin}: refused: the object in it has keys or tuples that repeat {count} entries until they "
                    f"are {machine.largest:.2g}, which no checkpoint does"
                )
    # genops and the machine fail on a damaged pickle in these ways. What is refused above is raised as CheckpointError.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError):
        pass
    finally:
        stream.seek(begin)


@dataclass
class _CostMachine:
    """The stack machine of pickle, with entries to walk through in the place of objects.

    stack, memo: numbers of objects, whose costs are in `costs`, so that what is put into a list later counts wherever
    the list is named. marks: lengths of the stack. largest: of a tuple, or of all keys so far.
    """

    largest: int = 0
    hashed: int = 0
    # By the number of an object; 0 is _CONSTANT, of cost 1.
    costs: list[int] = field(default_factory=lambda: [1])
    stack: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, int] = field(default_factory=dict)

    def run(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        name = opcode.name
        # Most opcodes of a checkpoint are constants.
        if (constants := _CONSTANTS.get(name)) is not None:
            self.stack += constants
        # GET, BINGET, LONG_BINGET; the same for PUT. The memo gives the object again, so that repetition is counted.
        elif name in _GETS:
            self.stack.append(self.memo[int(argument)])
        elif name in _PUTS:
            self.memo[int(argument)] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        elif name == "MARK":
            self.marks.append(len(self.stack))
        # POP removes the mark if nothing is above it: so protocol 0 gives up a tuple that contains itself.
        elif name == "POP" and self.marks[-1:] == [len(self.stack)]:
            self.marks.pop()
        else:
            self._make(opcode, self._pop(opcode))

    def _make(self, opcode: pickletools.OpcodeInfo, taken: list[int]) -> None:
        name, costs = opcode.name, [self.costs[number] for number in taken]
        cost = 1 + sum(costs)
        if name in _TUPLES:
            self.largest = max(self.largest, cost)
        elif name in _KEYS:
            self.hashed += sum(costs[_KEYS[name]])
            self.largest = max(self.largest, self.hashed)
        # The container stays the same object with a larger cost; others make a new one.
        if name in _FILLS:
            self.costs[taken[0]] = cost
            self.stack.append(taken[0])
        elif opcode.stack_after:
            self.stack.append(len(self.costs))
            self.costs.append(cost)

    def _pop(self, opcode: pickletools.OpcodeInfo) -> list[int]:
        """The objects that an opcode takes; what stands above the last mark is one of its operands."""
        below = _MARKS.get(opcode.name)
        first = len(self.stack) - len(opcode.stack_before) if below is None else self.marks.pop() - below
        taken = self.stack[first:]
        del self.stack[first:]
        return taken

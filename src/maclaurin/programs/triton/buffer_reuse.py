"""Copies into shared memory that an asynchronous matrix product may still be reading, in triton's GPU dialect (TTGIR).

Hopper's matrix products run asynchronously. In a pipelined loop they read tiles from buffers in shared memory, and copies
of later tiles refill these buffers. triton 3.6 to 3.9 gives a tile that is also read into registers no further buffer for
the time that products are running, and yet lets them run on into the next iteration:

    product of buffer 0 ……………………………………… finished
             copy of the next tile to buffer 0 ……          a part of the product reads the next tile

Whether that happens depends on how long a copy takes, so results are wrong only sometimes.

The loops are simulated for some iterations: which products are unfinished (`warp_group_dot_wait` leaves the last few), and
which slots of which buffers they read. The slot numbers are integers that the loop carries along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: more iterations than any buffer has slots
_ITERATIONS = 12

_DEFINED = re.compile(r"\s*(%[\w.]+)(?::\d+)? = ")
_CONSTANT = re.compile(r"(%\S+) = arith\.constant (-?\d+) : i32")
_SUM = re.compile(r"(%\S+) = arith\.(addi|subi) (%\S+), (%\S+) : i32")
_COMPARISON = re.compile(r"(%\S+) = arith\.cmpi (\w+), (%\S+), (%\S+) : i32")
_CHOICE = re.compile(r"(%\S+) = arith\.select (%\S+), (%\S+), (%\S+) : i32")
_ALLOCATION = re.compile(r"(%\S+) = ttg\.local_alloc ")
_SLOT = re.compile(r"(%\S+) = ttg\.memdesc_index (%[^\[]+)\[(%[^\]]+)\]")
_VIEW = re.compile(r"(%\S+) = ttg\.memdesc_(?:trans|reinterpret|subslice|reshape) (%[\w.#]+)")
_PRODUCT = re.compile(r"= ttng\.warp_group_dot (%[\w.#]+), (%[\w.#]+), ")
_WAIT = re.compile(r"= ttng\.warp_group_dot_wait .*pendings = (\d+)")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %[\w.#]+, (%[\w.#]+)")
_STORE = re.compile(r"ttg\.local_store %[\w.#]+, (%[\w.#]+)")
_FILLED = re.compile(r"(%\S+) = ttg\.local_alloc %")
_COMPARE = {
    "slt": int.__lt__,
    "sle": int.__le__,
    "sgt": int.__gt__,
    "sge": int.__ge__,
    "eq": int.__eq__,
    "ne": int.__ne__,
}


def refilled_too_early(ttgir: str) -> list[str]:
    """The operations that write to shared memory while an unfinished product reads it."""
    lines = [re.sub(r"\s+loc\(.*$", "", line) for line in ttgir.splitlines()]
    found = []
    for loop in _loops(lines):
        seen = lines[: loop.end]
        numbers = {known[1]: int(known[2]) for line in seen if (known := _CONSTANT.search(line))}
        found += [line.strip() for line in _Simulation(_buffers(seen), numbers).run(loop)]
    return found


@dataclass(frozen=True)
class _Buffer:
    """A buffer in shared memory, or the slot of it that a number chooses."""

    allocation: str
    slot: str | None = None


def _buffers(lines: list[str]) -> dict[str, _Buffer]:
    """What every name in shared memory stands for. A name of another loop may stand for something else now."""
    known: dict[str, _Buffer] = {}
    for line in lines:
        if defined := _DEFINED.match(line):
            known.pop(defined[1], None)
        if found := _ALLOCATION.search(line):
            known[found[1]] = _Buffer(found[1])
        elif (found := _SLOT.search(line)) and found[2] in known:
            known[found[1]] = _Buffer(known[found[2]].allocation, found[3])
        elif (found := _VIEW.search(line)) and found[2] in known:
            known[found[1]] = known[found[2]]
    return known


@dataclass(frozen=True)
class _Loop:
    """The lines of an innermost loop, and the names that it carries along: (name, first value, next value)."""

    end: int
    body: list[str]
    carried: list[tuple[str, str, str]]


def _loops(lines: list[str]) -> Iterator[_Loop]:
    """The innermost loops with asynchronous products."""
    open_loops: list[int] = []
    innermost = False
    for number, line in enumerate(lines):
        if "scf.for " in line:
            open_loops.append(number)
            innermost = True
        elif open_loops and re.match(rf"\s{{{_indent(lines[open_loops[-1]])}}}\}}", line):
            start = open_loops.pop()
            body = lines[start + 1 : number]
            if innermost and any("isAsync = true" in text for text in body):
                yield _Loop(number, body, _carried(lines[start], body))
            innermost = False


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _carried(head: str, body: list[str]) -> list[tuple[str, str, str]]:
    found = re.search(r"iter_args\((.*?)\) ->", head)
    if found is None:
        return []
    pairs = [pair.split(" = ") for pair in found[1].split(", ")]
    last = next(text for text in reversed(body) if "scf.yield" in text)
    following = last.split("scf.yield ")[1].split(" : ")[0].split(", ")
    return [(name, first, then) for (name, first), then in zip(pairs, following, strict=True)]


@dataclass
class _Simulation:
    """Some iterations of a loop."""

    buffers: dict[str, _Buffer]
    numbers: dict[str, int]
    unfinished: list[set[tuple[str, int | None]]] = field(default_factory=list)

    def run(self, loop: _Loop) -> Iterator[str]:
        """The lines that refill what an unfinished product reads, each once."""
        self.numbers |= {
            name: self.numbers[first] for name, first, _ in loop.carried if first in self.numbers
        }
        found: dict[str, None] = {}
        for _ in range(_ITERATIONS):
            for line in loop.body:
                if self._refills_too_early(line):
                    found[line] = None
            self.numbers |= {
                name: self.numbers[then] for name, _, then in loop.carried if then in self.numbers
            }
        return iter(found)

    def _refills_too_early(self, line: str) -> bool:
        """Carry out one operation; whether it writes to what an unfinished product reads."""
        self._count(line)
        if product := _PRODUCT.search(line):
            self.unfinished.append({self._place(name) for name in product.groups() if name in self.buffers})
            if "isAsync = true" not in line:
                self.unfinished.clear()
        elif wait := _WAIT.search(line):
            kept = int(wait[1])
            self.unfinished = self.unfinished[-kept:] if kept else []
        elif copy := _COPY.search(line) or _STORE.search(line) or _FILLED.search(line):
            return copy[1] in self.buffers and any(self._place(copy[1]) in read for read in self.unfinished)
        return False

    def _place(self, name: str) -> tuple[str, int | None]:
        buffer = self.buffers[name]
        return buffer.allocation, None if buffer.slot is None else self.numbers[buffer.slot]

    def _count(self, line: str) -> None:
        """Operations on the numbers that are known."""
        known = self.numbers
        if (found := _SUM.search(line)) and {found[3], found[4]} <= known.keys():
            sign = 1 if found[2] == "addi" else -1
            known[found[1]] = known[found[3]] + sign * known[found[4]]
        elif (found := _COMPARISON.search(line)) and {found[3], found[4]} <= known.keys():
            known[found[1]] = int(_COMPARE[found[2]](known[found[3]], known[found[4]]))
        elif (found := _CHOICE.search(line)) and found[2] in known:
            chosen = found[3] if known[found[2]] else found[4]
            if chosen in known:
                known[found[1]] = known[chosen]

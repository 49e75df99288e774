"""Machine code of a compiled program, read: loops, spills, and registers written under a running product.

Hopper's matrix products run beside the other instructions. One that takes its left operand from registers reads
them until a WARPGROUP.DEPBAR says that it is over; nothing may write there before. triton 3.6 lets the last parts
of a product run on into the next turn of a loop, and the assembler does not see that far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MATRIX = re.compile(r"(?:HGMMA|QGMMA|HMMA)\b")
_SPILL = re.compile(r"(?:LDL|STL)\b")
_FROM_REGISTERS = re.compile(r"[HQ]GMMA\S+ R\d+, R(\d+), ")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_WRITES = re.compile(r"(?!ST|RED\b|LDGSTS|BAR|BRA)([A-Z][\w.]*)\s+(?:U?P\w+, )*R(\d+)\b")
#: registers of a left operand 64 × 16 of two bytes, or 64 × 8 of four
_OPERAND = 4


def instructions(code: str) -> dict[int, str]:
    """Machine instructions by address, without their predicates."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.+?);", code, re.M)
    return {int(address, 16): text for address, text in lines}


def spills(code: dict[int, str]) -> int:
    """Loads and stores of spilled registers."""
    return sum(bool(_SPILL.match(text)) for text in code.values())


def spills_in_loops(code: dict[int, str]) -> int:
    """Spill traffic in innermost loops with a matrix product: there it costs time at every turn."""
    return sum(bool(_SPILL.match(text)) for body in multiplying_loops(code) for text in body)


def overwritten_operands(code: dict[int, str]) -> list[str]:
    """Instructions that write where a product of the same or the last turn of a loop may still read."""
    return [text for body in multiplying_loops(code) for text in _overwriting([*body, *body])]


def multiplying_loops(code: dict[int, str]) -> Iterator[list[str]]:
    """The innermost loops with a matrix product."""
    jumps = [(int(found[1], 16), at) for at, text in code.items() if (found := _jump(text))]
    loops = [(start, end) for start, end in jumps if start < end]
    for a, b in loops:
        if any(a <= c and d < b for c, d in loops if (c, d) != (a, b)):
            continue
        body = [text for at, text in code.items() if a <= at <= b]
        if any(map(MATRIX.match, body)):
            yield body


def _jump(text: str) -> re.Match[str] | None:
    return re.match(r"BRA(?:\.\w+)*\s+(?:U?!?U?P\w+,\s*)?0x([0-9a-f]+)", text)


def _overwriting(body: list[str]) -> Iterator[str]:
    running: list[set[int]] = []  # registers that each group of products under way reads
    closed = True
    for text in body:
        if wait := _WAIT.match(text):
            kept = int(wait[1], 16)
            running = running[-kept:] if kept else []
            closed = True
        elif product := _FROM_REGISTERS.match(text):
            first = int(product[1])
            if closed:
                running.append(set())
            running[-1].update(range(first, first + _OPERAND))
            closed = "gsb0" in text
        elif MATRIX.match(text):
            if closed:
                running.append(set())
            closed = "gsb0" in text
        elif (written := _written(text)) and any(written & registers for registers in running):
            yield text


def _written(text: str) -> set[int]:
    """General registers an instruction writes."""
    found = _WRITES.match(text)
    if found is None:
        return set()
    name, first = found[1], int(found[2])
    four, two = re.search(r"\.128|LDSM\S*\.4", name), re.search(r"^D[A-Z]|64|\.WIDE|LDSM\S*\.2", name)
    return set(range(first, first + (4 if four else 2 if two else 1)))

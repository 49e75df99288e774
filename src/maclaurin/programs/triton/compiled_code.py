"""Compile the programs for a GPU that this machine does not have, and report their resource usage.

    with compiled_for(90) as found:
        quadratic_polynomial.forward(q, k, v, call)      # tensors on the CPU; nothing runs
    found[0].registers, found[0].spilled, found[0].shared, found[0].matrix_instructions

triton ships its own assembler, so any machine can check whether a program spills registers, fits into shared memory
and uses the matrix units.

The second half of this file reads the machine code and looks for spills in loops and for two compiler bugs:

  * Hopper's matrix products are asynchronous. A product whose left operand is in registers reads them until a
    WARPGROUP.DEPBAR waits for it; nothing may write to them earlier. triton 3.6 lets the last parts of a product run
    into the next iteration of a loop, and the assembler does not notice when that iteration overwrites the operand.
  * Where two operands share one buffer of shared memory, one after the other, ptxas of CUDA 12.8 has computed an
    address from a uniform register that no instruction had set.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from maclaurin.programs.triton.buffer_reuse import refilled_too_early

# -------------------------------------------------------------------------------------------------- compiling


@dataclass(frozen=True)
class CompiledProgram:
    """The resource usage of one program.

    registers               per thread
    spills                  loads and stores of spilled registers in the whole program
    spills_in_loops         those within the loops that multiply matrices
    shared                  bytes of shared memory
    matrix_instructions     how many there are
    serialized              whether the assembler makes them wait for each other (its warning C7515), for instance
                            because accumulators pass through a branch
    overwritten             instructions that write to registers a running product may still read: results are wrong
    unset                   instructions that read uniform registers that were never set: results are wrong
    refilled                copies into shared memory that a running product may still read: results are wrong, unless
                            the program is serialized
    """

    name: str
    warps: int
    registers: int
    spills: int
    spills_in_loops: int
    shared: int
    matrix_instructions: int
    serialized: bool
    overwritten: list[str]
    unset: list[str]
    refilled: list[str]


class _NoGPU:
    """The part of triton's driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextlib.contextmanager
def compiled_for(capability: int, *, describe: bool = True) -> Iterator[list[CompiledProgram]]:
    """A context in which launches only compile; the list receives a description of each program.

    Without `describe`, programs are only put into triton's cache, for a later process on a GPU.
    """
    found: list[CompiledProgram] = []
    launch, active = JITFunction.run, driver._active

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        if describe:
            found.append(_described(self.__name__, kernel, capability))
        return kernel

    driver.set_active(_NoGPU(capability))  # type: ignore[arg-type]
    JITFunction.run = compile_only  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]
        driver._active = active  # reset_active would look for a GPU


def _described(name: str, kernel: Any, capability: int) -> CompiledProgram:
    listing = _listing(kernel.asm["cubin"])
    registers = max(map(int, re.findall(r"REG:(\d+)", listing)))
    found = instructions(listing)
    matrix = sum(bool(MATRIX.match(text)) for text in found.values())
    return CompiledProgram(
        name,
        warps=kernel.metadata.num_warps,
        registers=registers,
        spills=spills(found),
        spills_in_loops=spills_in_loops(found),
        shared=kernel.metadata.shared,
        matrix_instructions=matrix,
        serialized=matrix > 0 and _is_serialized(kernel, capability),
        overwritten=overwritten_operands(found),
        unset=unset_operands(found),
        refilled=refilled_too_early(kernel.asm["ttgir"]),
    )


def _is_serialized(kernel: Any, capability: int) -> bool:
    """Whether the assembler warns of it. It is run again for this, since triton does not report its warnings."""
    refused = ""
    with tempfile.TemporaryDirectory() as folder:
        code, out = Path(folder) / "program.ptx", Path(folder) / "out"
        code.write_text(kernel.asm["ptx"])
        for assembler in _assemblers():  # the first that supports this PTX version
            command = [assembler, "-v", f"--gpu-name=sm_{capability}a", code, "-o", out]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return "wgmma.mma_async instructions are serialized" in result.stdout + result.stderr
            refused += f"\n{assembler.name}: {(result.stdout + result.stderr).strip()[:500]}"
    raise RuntimeError(f"no assembler accepts the program {kernel.metadata.name!r}:{refused}")


def _assemblers() -> list[Path]:
    """The assembler that triton is configured to use, and the ones it ships."""
    own = [_TOOLS / name for name in ("ptxas", "ptxas-blackwell")]
    return [path for path in (Path(knobs.nvidia.ptxas.path), *own) if path.exists()]


_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@lru_cache(maxsize=64)
def _listing(cubin: bytes) -> str:
    """Resource usage and machine code; small programs are compiled by many callers."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "program.cubin"
        binary.write_bytes(cubin)
        command = [_TOOLS / "cuobjdump", "--dump-resource-usage", "-sass", binary]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# --------------------------------------------------------------------------------------- reading machine code


MATRIX = re.compile(r"(?:HGMMA|QGMMA|HMMA)\b")
_SPILL = re.compile(r"(?:LDL|STL)\b")
_FROM_REGISTERS = re.compile(r"[HQ]GMMA\S+ R\d+, R(\d+), ")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_WRITES = re.compile(r"(?!ST|RED\b|LDGSTS|BAR|BRA)([A-Z][\w.]*)\s+(?:U?P\w+, )*R(\d+)\b")
#: registers per thread of a left operand: 64 × 16 entries of two bytes, or 64 × 8 of four
_OPERAND = 4


def instructions(code: str) -> dict[int, str]:
    """Machine instructions by address, without predicates."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.+?);", code, re.M)
    return {int(address, 16): text for address, text in lines}


def spills(code: dict[int, str]) -> int:
    """Loads and stores of spilled registers."""
    return sum(bool(_SPILL.match(text)) for text in code.values())


def spills_in_loops(code: dict[int, str]) -> int:
    """Spills in innermost loops with a matrix product, where they cost time in every iteration."""
    return sum(bool(_SPILL.match(text)) for body in multiplying_loops(code) for text in body)


def overwritten_operands(code: dict[int, str]) -> list[str]:
    """Instructions that write to registers which a product of the same or the previous iteration may still read."""
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
    running: list[set[int]] = []  # the registers that each unfinished group of products reads
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
    """The general registers that an instruction writes."""
    found = _WRITES.match(text)
    if found is None:
        return set()
    name, first = found[1], int(found[2])
    four, two = re.search(r"\.128|LDSM\S*\.4", name), re.search(r"^D[A-Z]|64|\.WIDE|LDSM\S*\.2", name)
    return set(range(first, first + (4 if four else 2 if two else 1)))


_UNIFORM = re.compile(r"\bUR(\d+)\b")
_PRODUCT = re.compile(r"\bgdesc\[UR(\d+)\]")
_SETS_UNIFORM = re.compile(r"([A-Z][\w.]*)\s+(?:U?P\w+, )*UR(\d+)\b")
#: instructions that only read uniform registers: addresses of shared memory, descriptors of global memory
_NOT_A_RESULT = ("STS", "STG", "BAR", "BRA", "SYNCS", "UTM", "UBLK")


def unset_operands(code: dict[int, str]) -> list[str]:
    """Instructions that read a uniform register which no earlier instruction sets."""
    known: set[int] = set()
    found = []
    for _, text in sorted(code.items()):
        result = None if text.startswith(_NOT_A_RESULT) else _SETS_UNIFORM.match(text)
        operands = text[result.end() :] if result else text
        if not _uniform_reads(operands, text) <= known:
            found.append(text)
        if result:
            first = int(result[2])
            pair = re.search(r"\.64|\.WIDE", result[1])
            known.update({first, first + 1} if pair else {first})
    return found


def _uniform_reads(operands: str, text: str) -> set[int]:
    """The uniform registers read: a product reads four, or two if its left operand is in registers."""
    read = {int(n) for n in _UNIFORM.findall(_PRODUCT.sub("", operands))}
    product = _PRODUCT.search(text)
    if product is not None:
        first = int(product[1])
        read.update(range(first + 2 if _FROM_REGISTERS.match(text) else first, first + 4))
    return read

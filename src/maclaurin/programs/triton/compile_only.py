"""Compile the programs for a GPU that is not there, and read what they would take of it.

    with compiled_for(90) as found:
        polynomial_quadratic.forward(q, k, v, call)      # tensors on the CPU; nothing runs
    found[0].registers, found[0].spilled, found[0].shared, found[0].matrix_instructions

triton brings its own assembler, so any machine can say whether a program spills registers, fits the shared
memory and reaches the matrix units, before anybody has timed it.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from maclaurin.programs.triton import machine_code


@dataclass(frozen=True)
class CompiledProgram:
    """What one program takes.

    registers               per thread
    spills                  loads and stores of spilled registers in all of the program
    spills_in_loops         those within the loops that multiply matrices
    shared                  bytes of shared memory
    matrix_instructions     how many there are
    serialized              whether the assembler makes them wait for each other (its warning C7515), for instance
                            where a branch hands accumulators on
    overwritten             instructions that write registers a running product may still read: results are wrong
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


class _NoGPU:
    """As much of a driver as compiling asks for."""

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
    """Launches inside compile only; the list fills with what they would have run.

    Without `describe` they only go into triton's cache, which a later process on a GPU finds them in.
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
        driver._active = active  # reset_active would ask for a GPU


def _described(name: str, kernel: Any, capability: int) -> CompiledProgram:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "program.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        usage = _cuobjdump("--dump-resource-usage", binary)
        code = _cuobjdump("-sass", binary)
    registers = max(map(int, re.findall(r"REG:(\d+)", usage)))
    instructions = machine_code.instructions(code)
    matrix = sum(bool(machine_code.MATRIX.match(text)) for text in instructions.values())
    return CompiledProgram(
        name,
        warps=kernel.metadata.num_warps,
        registers=registers,
        spills=machine_code.spills(instructions),
        spills_in_loops=machine_code.spills_in_loops(instructions),
        shared=kernel.metadata.shared,
        matrix_instructions=matrix,
        serialized=matrix > 0 and _is_serialized(kernel, capability),
        overwritten=machine_code.overwritten_operands(instructions),
    )


def _is_serialized(kernel: Any, capability: int) -> bool:
    """What the assembler says, asked again: triton does not hand its remarks on."""
    refused = ""
    with tempfile.TemporaryDirectory() as folder:
        code, out = Path(folder) / "program.ptx", Path(folder) / "out"
        code.write_text(kernel.asm["ptx"])
        for assembler in _assemblers():  # whichever knows this version of the language
            command = [assembler, "-v", f"--gpu-name=sm_{capability}a", code, "-o", out]
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            if said.returncode == 0:
                return "wgmma.mma_async instructions are serialized" in said.stdout + said.stderr
            refused += f"\n{assembler.name}: {(said.stdout + said.stderr).strip()[:500]}"
    raise RuntimeError(f"no assembler takes the program {kernel.metadata.name!r}:{refused}")


def _assemblers() -> list[Path]:
    """triton's own, and the one it is set to use."""
    own = [_TOOLS / name for name in ("ptxas", "ptxas-blackwell")]
    return [path for path in (Path(knobs.nvidia.ptxas.path), *own) if path.exists()]


_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _cuobjdump(option: str, binary: Path) -> str:
    command = [_TOOLS / "cuobjdump", option, binary]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

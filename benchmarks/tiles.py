"""Find the fastest tiles of the fused programs on this GPU: compile candidates in parallel, then time them.

    python benchmarks/tiles.py [quadratic exp linear …] [--out benchmarks/results/tiles.json]

Candidates that spill registers are left out. Prints the fastest tiles of each pass and the current ones.
Enter better ones in TILES of programs/triton/*.py.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from machine import stamp
from torch.profiler import ProfilerActivity, profile

from maclaurin.programs.triton import linear_time, moments, quadratic_polynomial, score_mod
from maclaurin.programs.triton.compiled_code import compiled_for
from maclaurin.programs.triton.launch import forget_launches
from maclaurin.programs.triton.tiles import Tile

RESULTS = Path(__file__).parent / "results" / "tiles.json"
CANDIDATES = [
    Tile(32, 64, 4, 3), Tile(32, 128, 4, 3), Tile(64, 32, 4, 3), Tile(128, 32, 4, 3),
    Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 64, 8, 3),
    Tile(64, 128, 4, 2), Tile(64, 128, 8, 2), Tile(64, 128, 8, 3),
    Tile(128, 64, 4, 2), Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3),
]  # fmt: skip
#: number of spills that does not slow down a loop
SPILLS = 24
TAYLOR = (1.0, 0.125, 1 / 128)


def random(device: str, batch: int, tokens: int, heads: int, *sizes: int) -> list[torch.Tensor]:
    make = torch.empty if device == "cpu" else torch.randn
    return [make(batch, tokens, heads, size, device=device, dtype=torch.bfloat16) for size in sizes]


def quadratic(device: str, d: int) -> Callable[[], object]:
    q, k, v = random(device, 8, 4096, 16, d, d, d)
    call = quadratic_polynomial.Call(TAYLOR, "sum", 0.0, True, narrow=True)

    def once() -> object:
        y, rest, z = quadratic_polynomial.forward(q, k, v, call)
        return quadratic_polynomial.backward(y, q, k, v, y, rest, z, call)

    return once


def modified_exp(device: str, d: int, *, gated: bool) -> Callable[[], object]:
    q, k, v = (u.transpose(1, 2) for u in random(device, 8, 4096, 16, d, d, d))
    totals = None
    if gated:
        totals = -torch.rand(8, 16, 4096, device=device, dtype=torch.float64).cumsum(-1) / 100
    call = score_mod.Call(d**-0.5, True, clamp=None if gated else 5.0)

    def once() -> object:
        o, lse = score_mod.forward(q, k, v, totals, call)
        return score_mod.backward(o, q, k, v, totals, lse, lse, call)

    return once


def linear(
    device: str, batch: int, heads: int, tokens: int, d: int, e: int, chunk: int
) -> Callable[[], object]:
    q, k, v = random(device, batch, tokens, heads, d, d, e)
    rows, call = linear_time.Rows(), linear_time.Call(TAYLOR, "sum", 0.0, chunk, narrow=True)

    def once() -> object:
        y, rest, divisor, past, _ = linear_time.forward(q, k, v, rows, call)
        return linear_time.backward(y, None, q, k, v, y, rest, divisor, rows, past, call)

    return once


SETTINGS: dict[str, tuple[Callable[[str], Callable[[], object]], dict]] = {
    "quadratic d=64": (lambda device: quadratic(device, 64), quadratic_polynomial.TILES),
    "quadratic d=128": (lambda device: quadratic(device, 128), quadratic_polynomial.TILES),
    "exp clamp d=64": (lambda device: modified_exp(device, 64, gated=False), score_mod.TILES),
    "exp clamp d=128": (lambda device: modified_exp(device, 128, gated=False), score_mod.TILES),
    "exp forget d=64": (lambda device: modified_exp(device, 64, gated=True), score_mod.TILES),
    "exp forget d=128": (lambda device: modified_exp(device, 128, gated=True), score_mod.TILES),
    "linear d=64": (lambda device: linear(device, 1, 8, 65536, 64, 64, 1024), linear_time.TILES),
    "linear d=16": (lambda device: linear(device, 8, 16, 4096, 16, 64, 512), linear_time.TILES),
}


def use(tiles: dict, tile: Tile | None, in_use: dict) -> None:
    """Use one tile for all passes, or restore the current ones."""
    tiles.update(in_use if tile is None else dict.fromkeys(tiles, (tile, tile)))
    moments.HIGH = moments.HIGH if tile is None else (tile.keys, tile.warps, tile.stages)
    forget_launches()


def compile_one(setting: str, tile: Tile | None) -> int | None:
    """Registers spilled in loops; None if the tile cannot be compiled."""
    make, tiles = SETTINGS[setting]
    use(tiles, tile, {})
    try:
        with compiled_for(90) as found:
            make("cpu")()
    except Exception:  # out of shared memory, or a limit of the compiler
        if tile is None:  # the current tiles must compile
            raise
        return None
    return max(program.spills_in_loops for program in found)


def kernel_times(once: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Milliseconds of each kernel of a call."""
    once()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            once()
        torch.cuda.synchronize()
    return {e.key[:40]: round(e.device_time_total / 1e3 / repeats, 4) for e in found.key_averages()}


def time_setting(setting: str, tiles_to_try: list[Tile]) -> dict:
    make, tiles = SETTINGS[setting]
    once, in_use, high = make("cuda"), dict(tiles), moments.HIGH
    rows = [{"tile": None, "ms": kernel_times(once)}]
    for tile in tiles_to_try:
        use(tiles, tile, in_use)
        try:
            rows.append({"tile": asdict(tile), "ms": kernel_times(once)})
        except Exception as error:
            rows.append({"tile": asdict(tile), "error": type(error).__name__})
    use(tiles, None, in_use)
    moments.HIGH = high
    return {"in_use": {name: [asdict(t) for t in pair] for name, pair in in_use.items()}, "timed": rows}


def show(setting: str, found: dict) -> None:
    timed = [row for row in found["timed"] if "ms" in row]
    base = timed[0]["ms"]
    print(f"{setting}: {sum(base.values()):.3f} ms in all with the current tiles")
    for name in sorted(base, key=base.get, reverse=True)[:8]:
        others = [row for row in timed[1:] if name in row["ms"]]
        best = sorted(others, key=lambda row: row["ms"][name])[:3]
        text = "; ".join(f"{row['ms'][name]:.3f} {tuple(row['tile'].values())}" for row in best)
        print(f"   {name:40} {base[name]:.3f} | {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="beginnings of settings, such as linear")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = [s for s in SETTINGS if not options.only or s.startswith(tuple(options.only))]
    jobs = [(s, tile) for tile in [None, *CANDIDATES] for s in chosen]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        spills = dict(zip(jobs, pool.map(compile_one, *zip(*jobs, strict=True)), strict=True))
    data = {"machine": stamp(), "settings": {}}
    for setting in chosen:
        fitting = [t for t in CANDIDATES if (spilled := spills[setting, t]) is not None and spilled <= SPILLS]
        data["settings"][setting] = time_setting(setting, fitting)
        show(setting, data["settings"][setting])
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

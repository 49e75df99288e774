"""Targets of a case: a factor of a peer's time or memory, bytes, or a rate.

Targets are for the full shapes on a GPU; elsewhere the same values are shown without a verdict. Targets in
milliseconds are for an H200.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from maclaurin.bench.bench_record import Figures, Verdict

Pass = Literal["forward", "forward+backward"]
BOTH_PASSES: tuple[Pass, ...] = ("forward", "forward+backward")
H200 = "H200"

#: peers as targets and tables name them
PEER_TITLES = {
    "sdpa": "cuDNN SDPA",
    "flex": "FlexAttention",
    "chunk_linear_attn": "fla chunk_linear_attn",
    "fused_chunk_based": "fla fused_chunk_based",
    "power_retention": "retention power_retention",
    "parallel": "its own parallel form",
    "about_zero": "our taylor(2)/sum",
    "ungated": "our linear(identity)",
    "equal_rows": "our equal rows",
}


@final
@dataclass(frozen=True)
class Measured:
    """The figures that a verdict depends on."""

    own: Figures
    peers: Mapping[str, Figures]
    share_of_copy: float | None
    #: the name of the GPU; None on a CPU
    gpu: str | None
    full_shapes: bool

    @property
    def is_comparable(self) -> bool:
        """Whether the targets were set for such a run."""
        return self.gpu is not None and self.full_shapes

    @property
    def is_h200(self) -> bool:
        """Whether milliseconds can be compared with those of an H200."""
        return self.is_comparable and H200 in (self.gpu or "")


@final
@dataclass(frozen=True)
class Reading:
    """The value of a target; `comparable` is False if there is nothing to compare it with."""

    value: float | None
    comparable: bool = True
    note: str = ""


NOT_MEASURED = Reading(None, note="not measured")


class Target(ABC):
    """A limit that a value must not exceed, or must reach if `is_least`."""

    is_least = False

    @property
    @abstractmethod
    def text(self) -> str:
        """How it is written in tables."""

    @property
    @abstractmethod
    def limit(self) -> float:
        """The number to compare with."""

    @abstractmethod
    def read(self, measured: Measured) -> Reading:
        """The value to compare with the limit."""

    def judge(self, measured: Measured) -> Verdict:
        """The verdict: a case without a figure misses its target; without the peer's figure there is none."""
        reading = self.read(measured)
        reached = None
        if measured.is_comparable and reading.comparable:
            reached = reading.value is not None and self._holds(reading.value)
        return Verdict(self.text, reading.value, self.limit, reached, reading.note)

    def _holds(self, value: float) -> bool:
        return value >= self.limit if self.is_least else value <= self.limit


@final
@dataclass(frozen=True)
class TimeAgainst(Target):
    """time ≤ factor × the peer's, in one run.

    Times are those of the GPU, replayed as CUDA graphs, where both programs have them; else those of calls
    from Python, which include waiting for a slow CPU. The CPU's time has its own target (`IssuedWithin`).
    """

    factor: float
    peer: str
    which: Pass

    @property
    def text(self) -> str:
        """For example: forward ≤ 1.15 × cuDNN SDPA"""
        return f"{self.which} ≤ {self.factor:g} × {PEER_TITLES[self.peer]}"

    @property
    def limit(self) -> float:
        """The factor of the peer's figure."""
        return self.factor

    def read(self, measured: Measured) -> Reading:
        """Our time divided by the peer's."""
        own, peer = time_of(measured.own, self.which), measured.peers[self.peer]
        if own is None:
            return NOT_MEASURED
        theirs = time_of(peer, self.which)
        if theirs is None:
            return Reading(None, False, peer.note)
        other = _other_name(self.peer, peer)
        own_graph, their_graph = graph_time_of(measured.own, self.which), graph_time_of(peer, self.which)
        if own_graph is None or their_graph is None:
            return Reading(own / theirs, note=other)
        note = f"called from Python {own / theirs:.3g}"
        return Reading(own_graph / their_graph, note=f"{note}, {other}" if other else note)


@final
@dataclass(frozen=True)
class TimeAtMost(Target):
    """A limit in milliseconds on an H200, for forward and backward together."""

    most_ms: float

    @property
    def text(self) -> str:
        """For example: forward+backward ≤ 5 ms on an H200"""
        return f"forward+backward ≤ {self.most_ms:g} ms on an H200"

    @property
    def limit(self) -> float:
        """The limit in milliseconds."""
        return self.most_ms

    def read(self, measured: Measured) -> Reading:
        """Our time."""
        called, replayed = measured.own.forward_backward_ms, measured.own.graph_forward_backward_ms
        if called is None:
            return NOT_MEASURED
        if replayed is None:
            return Reading(called, measured.is_h200)
        return Reading(replayed, measured.is_h200, f"called from Python {called:.3g} ms")


@final
@dataclass(frozen=True)
class MemoryAgainst(Target):
    """Peak memory beyond inputs and outputs ≤ factor × the peer's."""

    factor: float
    peer: str

    @property
    def text(self) -> str:
        """For example: memory ≤ 1.5 × cuDNN SDPA"""
        return f"memory ≤ {self.factor:g} × {PEER_TITLES[self.peer]}"

    @property
    def limit(self) -> float:
        """The factor of the peer's figure."""
        return self.factor

    def read(self, measured: Measured) -> Reading:
        """Our peak memory divided by the peer's."""
        own, peer = measured.own.peak_bytes, measured.peers[self.peer]
        if own is None:
            return NOT_MEASURED
        if peer.peak_bytes is None:
            return Reading(None, False, peer.note)
        if peer.peak_bytes == 0:
            return Reading(math.inf if own else 0.0)
        return Reading(own / peer.peak_bytes)


@final
@dataclass(frozen=True)
class MemoryAtMost(Target):
    """Peak memory beyond inputs and outputs, in gigabytes."""

    most_gb: float

    @property
    def text(self) -> str:
        """For example: memory ≤ 0.8 GB"""
        return f"memory ≤ {self.most_gb:g} GB"

    @property
    def limit(self) -> float:
        """The limit in gigabytes."""
        return self.most_gb

    def read(self, measured: Measured) -> Reading:
        """Our peak memory."""
        own = measured.own.peak_bytes
        return NOT_MEASURED if own is None else Reading(own / 1e9)


@final
@dataclass(frozen=True)
class ShareOfCopy(Target):
    """State bytes read and written per second, relative to a device copy."""

    is_least = True
    least: float

    @property
    def text(self) -> str:
        """For example: state traffic ≥ 60 % of a device copy"""
        return f"state traffic ≥ {100 * self.least:g} % of a device copy"

    @property
    def limit(self) -> float:
        """The least share."""
        return self.least

    def read(self, measured: Measured) -> Reading:
        """Our share of the rate of a copy."""
        share = measured.share_of_copy
        return NOT_MEASURED if share is None else Reading(share)


@final
@dataclass(frozen=True)
class FirstCall(Target):
    """Seconds until the first answer and its gradients, compilation included."""

    most_s: float

    @property
    def text(self) -> str:
        """For example: first call ≤ 10 s"""
        return f"first call ≤ {self.most_s:g} s"

    @property
    def limit(self) -> float:
        """The limit in seconds."""
        return self.most_s

    def read(self, measured: Measured) -> Reading:
        """The time of our first call. If it ran beside others and took too long, there is no verdict."""
        own, shared = measured.own.first_call_s, measured.own.first_call_shared
        if own is None:
            return NOT_MEASURED
        if not shared:
            return Reading(own)
        return Reading(own, own <= self.most_s, "beside first calls of other cases")


@final
@dataclass(frozen=True)
class IssuedWithin(Target):
    """Microseconds of CPU time of a forward call on an H200's host; `cold`: per call of ten after a pause."""

    most_us: float
    cold: bool = False

    @property
    def text(self) -> str:
        """For example: CPU time of a call ≤ 120 µs"""
        return f"CPU time of a call{' after a pause' if self.cold else ''} ≤ {self.most_us:g} µs"

    @property
    def limit(self) -> float:
        """The limit in microseconds."""
        return self.most_us

    def read(self, measured: Measured) -> Reading:
        """Our CPU time; the note gives it relative to torch's attention."""
        own = _issued(measured.own, self.cold)
        if own is None:
            return NOT_MEASURED
        peer = measured.peers.get("sdpa")
        theirs = None if peer is None else _issued(peer, self.cold)
        note = "" if theirs is None else f"{own / theirs:.2g} × {PEER_TITLES['sdpa']}"
        return Reading(own, measured.is_h200, note)


def _issued(figures: Figures, cold: bool) -> float | None:
    return figures.cold_issue_us if cold else figures.issue_us


def _other_name(key: str, peer: Figures) -> str:
    """The program that was measured instead of the one the target names."""
    return "" if peer.name == PEER_TITLES[key] else f"against {peer.name}"


def time_of(figures: Figures, which: Pass) -> float | None:
    """Milliseconds of a pass."""
    return figures.forward_ms if which == "forward" else figures.forward_backward_ms


def graph_time_of(figures: Figures, which: Pass) -> float | None:
    """Milliseconds of a pass replayed as a CUDA graph."""
    return figures.graph_ms if which == "forward" else figures.graph_forward_backward_ms

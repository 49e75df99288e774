"""What a figure was measured on: stamped into every result file."""

from maclaurin.bench.machine import stamp

__all__ = ["stamp"]

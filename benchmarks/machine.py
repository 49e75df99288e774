"""The machine that a result was measured on, written into every result file."""

from maclaurin.machine import provenance as stamp

__all__ = ["stamp"]

"""From the records of studies to tables, figures and one page. Needs no torch."""

from maclaurin.report.write import Report, write_report

__all__ = ["Report", "write_report"]

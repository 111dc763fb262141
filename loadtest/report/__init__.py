"""The report of a run: a self-contained HTML page, and pictures. Needs matplotlib."""

from outrider.loadtest.report.write import SECTIONS, SectionMaker, write_report

__all__ = ["SECTIONS", "SectionMaker", "write_report"]

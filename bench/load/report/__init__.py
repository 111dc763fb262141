"""The report of a run: a page that needs nothing but itself, and pictures. Needs matplotlib."""

from outrider.bench.load.report.write import SECTIONS, SectionMaker, write_report

__all__ = ["SECTIONS", "SectionMaker", "write_report"]

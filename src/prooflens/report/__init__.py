"""What is seen: one self-contained HTML file with pictures of what was proved, what was broken and what is open."""

from prooflens.report.data import ReportData, gather
from prooflens.report.page import render, report, write_figures, write_page

__all__ = ["ReportData", "gather", "render", "report", "write_figures", "write_page"]

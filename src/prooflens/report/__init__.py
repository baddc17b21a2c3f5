"""What is seen: one self-contained HTML file with pictures of what was proved, what was broken and what is open."""

from prooflens.report.data import ReportData, collect
from prooflens.report.folders import kind_of, unfolded
from prooflens.report.page import render, report, write_figures
from prooflens.report.written import write_page

__all__ = ["ReportData", "collect", "kind_of", "render", "report", "unfolded", "write_figures", "write_page"]

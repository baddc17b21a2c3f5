"""What is seen: one self-contained HTML file with pictures of what was proved, what was broken and what is open."""

from prooflens.report.data import ReportData, collect
from prooflens.report.page import is_family, render, report, write_figures
from prooflens.report.written import write_page

__all__ = ["ReportData", "collect", "is_family", "render", "report", "write_figures", "write_page"]

"""A finished, interrupted or running run as one HTML file, from the files in its folder alone."""

from tether.report.html import write_report

__all__ = ["write_report"]

"""HTML report about a run: one file that needs nothing else, no network and no script to be read."""

from isoscale.study.report.page import write_report as write_report

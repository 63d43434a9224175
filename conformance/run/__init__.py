"""Runs of many cases, and their records, reports and pages."""

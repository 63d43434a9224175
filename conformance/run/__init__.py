"""Runs of many cases, and what is written of them: records, reports, pages."""

"""Comparison of weight policies on one job: runs, statistics, tables and HTML page.

Not part of a run: `trials` enumerates the runs, `trainer` executes one, `record` persists it, `view` summarizes
them. `hetpipe compare` puts them together; nothing else imports this package.
"""

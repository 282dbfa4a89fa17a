"""A comparison of weight policies on one job: its runs, its statistics, its tables and its page.

A study and no part of a run: `trials` says which runs there are, `trainer` carries one out, `record` keeps it, `view`
says what they show. `hetpipe compare` puts them together; nothing else imports this package.
"""

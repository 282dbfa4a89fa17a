"""Frozen values that cross borders: ids, jobs, plans, reports."""

"""Frozen value types shared across packages: ids, jobs, plans, reports."""

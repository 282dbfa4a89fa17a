"""Observability of a run: logs, metrics, the public history, and the timeline of a pipeline."""

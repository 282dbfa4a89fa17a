"""Decisions about a job: from the queue over its plan and its training to its end, whoever dies on the way."""

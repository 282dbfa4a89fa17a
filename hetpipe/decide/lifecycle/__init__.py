"""Decisions about a job from its submission to its end, including all failures on the way."""

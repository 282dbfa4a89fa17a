"""Commands that read a run and change nothing."""

"""Commands that change a run: train, submit, stop, scale, export."""

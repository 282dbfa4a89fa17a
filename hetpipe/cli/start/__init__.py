"""Commands for a start: checks of this machine, a demo, a job template."""

"""Commands for getting started: checks of this machine, a demo, a job template."""

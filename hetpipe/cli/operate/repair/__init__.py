"""`hetpipe repair`: the persistent state of processes."""

"""`hetpipe repair`: what processes keep between restarts."""

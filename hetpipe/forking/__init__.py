"""Starting processes: as a program of their own, or forked from a fork server that has imported torch and hetpipe."""

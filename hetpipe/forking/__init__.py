"""Process creation: as separate programs, or forked from a fork server that has imported torch and hetpipe."""

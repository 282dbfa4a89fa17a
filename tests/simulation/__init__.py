"""Shards, stages and a coordinator in one process, under simulated time, network and disks (`reliability.md` §4)."""

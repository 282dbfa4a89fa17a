"""Tests of `hetpipe.check`, with a simulator that writes the histories they judge."""

"""Tests of `hetpipe.checker`, with a simulator that writes the histories they judge."""

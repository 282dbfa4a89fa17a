"""Tries of what is shipped as a whole; the standard library alone, since nothing is installed where they run."""

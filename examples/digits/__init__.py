"""A small classifier of real handwritten digits."""

"""Checkpoints: format, manifest, keeper, export."""

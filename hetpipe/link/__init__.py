"""Activations and gradients between neighbouring stages; start with `hetpipe.link.policy`."""

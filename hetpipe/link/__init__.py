"""Transport of activations and gradients between neighbouring stages; start reading at `hetpipe.link.policy`."""

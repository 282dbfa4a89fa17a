"""From the module a user already has to layers that can be cut: units, boundaries, the forward of one stage.

The user's own `forward` runs on every stage (`docs/decisions/0012-the-users-forward-runs-on-every-stage.md`). What
earlier stages have computed is not computed again: a *log* of it, and the values that are still needed, come with the
activations. `structure` takes what modules return apart, `graph` decides where a model may be cut and what crosses
there, `recording` watches the uncut model once to tell it, `forward` runs the layers of one stage.
"""

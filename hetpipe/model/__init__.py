"""Cutting a user's own module into layers: units, boundaries, and the forward of one stage.

The user's own `forward` runs on every stage (`docs/decisions/0012-the-users-forward-runs-on-every-stage.md`). Results
of earlier stages are not recomputed: a *log* of their calls and the values still needed come with the activations.
`recording` traces the uncut model once, `graph` decides where a model may be cut and what crosses there, `structure`
flattens what modules return, `forward` runs the layers of one stage.
"""

"""Cost of a model: measured per layer on local devices, estimated for other types, validated against memory.

    order ─► profiling ─► subject (the user's code) ─► chain_measurement ─► spec.measurement ─► cache
    spec.measurement ─► estimates (types that are not here) ─► assembly ─► the public profile
    live_bytes, stage_peak: actual memory of a stage, to validate predictions

`order`, `cache`, `estimates`, `assembly`, `kept` and `sampling` import no torch: the command line uses
them, and the rest runs in a process of its own.
"""

"""What a model costs: measured layer by layer on the devices at hand, estimated for others, checked against memory.

    order ─► profiling ─► subject (the user's code) ─► chain_measurement ─► spec.measurement ─► cache
    spec.measurement ─► estimates (types that are not here) ─► assembly ─► the public profile
    live_bytes, stage_peak: what a stage really keeps, to compare predictions with

`order`, `cache`, `estimates`, `assembly`, `kept` and `sampling` import no torch: the command line uses
them, and the rest runs in a process of its own.
"""

"""Curves of a run in TensorBoard, Weights & Biases and MLflow (job key `log`).

One process per job writes them: a child of the coordinator, which has all progress and evaluations. The coordinator
only passes values on, never waits for the child, and continues without it.
"""

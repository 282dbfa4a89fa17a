"""The model as a chain of layers, and the runtime of one stage."""

"""The order of a stage's computations, and its number of minibatches in flight. Pure."""

"""In which order does a stage compute, and how many minibatches are in flight? Pure."""

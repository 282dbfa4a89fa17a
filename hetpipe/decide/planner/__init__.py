"""Who does what: where the model is cut, which device computes which stage, which shard holds which parameter. Pure."""

"""The planner: cuts of the model, the device of each stage, and the shard of each parameter. Pure."""

"""How fast would a plan run? The decisions of the runtime, in simulated time. Pure."""

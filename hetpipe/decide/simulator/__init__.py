"""How fast would a plan run? A second interpreter of the runtime's decisions, in simulated time. Pure."""

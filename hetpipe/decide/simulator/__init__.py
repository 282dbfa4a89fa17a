"""Simulation of a plan: the runtime's decisions in simulated time. Pure."""

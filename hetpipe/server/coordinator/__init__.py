"""The process of a coordinator."""

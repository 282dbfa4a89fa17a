"""A cluster that runs for long: its services, their health, certificates and repairs."""

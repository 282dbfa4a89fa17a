"""Operation of a cluster: services, health, certificates and repairs."""

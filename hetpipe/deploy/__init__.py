"""Deployments: containers with their programs and devices, as files or as containers of this machine."""

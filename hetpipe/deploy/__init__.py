"""Deployments: containers with their programs and devices, as files and as containers of this machine."""

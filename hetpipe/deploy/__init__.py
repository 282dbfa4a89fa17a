"""Deployments: what runs in which container and on which devices, as files and as containers of this machine."""

"""A run from job to result: folder, services, following, verdict."""

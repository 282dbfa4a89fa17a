"""The execution of a run, from job to result: folder, services, following, verdict."""

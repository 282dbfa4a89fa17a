"""Before the first job: what this machine has, a demo, a job to start from."""

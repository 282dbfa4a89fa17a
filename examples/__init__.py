"""Jobs to run and to copy from; each folder holds a job file, the code it names and a short page."""

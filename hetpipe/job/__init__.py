"""The job file: its model, its rules, and reporting of all mistakes at once."""

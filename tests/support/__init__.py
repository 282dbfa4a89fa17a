"""What tests need and users may find useful: fake time, in-process runs, contract suites."""

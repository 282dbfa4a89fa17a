"""When may a worker start, push, pull, and what is decided in which order? Pure."""

"""`hetpipe certs`: a private authority, and one certificate per process."""

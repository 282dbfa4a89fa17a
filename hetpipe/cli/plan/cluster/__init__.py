"""`hetpipe cluster`: cluster files and what is known of devices."""

"""`hetpipe cluster`: cluster files and the catalogue of device types."""

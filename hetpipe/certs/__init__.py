"""Certificates: a private authority, one certificate per process, and the folders they are kept in."""

"""What hetpipe is built of: locked packages, and images by digest."""

"""Before training: what layers and links cost, which device computes what, how fast that will be."""

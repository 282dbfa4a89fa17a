"""Commands before training: profiles of layers and links, plans, predictions of speed."""

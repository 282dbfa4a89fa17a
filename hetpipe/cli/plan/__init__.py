"""Planning commands: profiles of layers and links, plans, predictions of speed."""

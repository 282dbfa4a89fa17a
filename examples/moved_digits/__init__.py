"""A harder image job: handwritten digits that were enlarged, turned and moved, and a small convolutional network."""

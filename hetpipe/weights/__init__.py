"""Weight versions of a stage: which tensors exist, and their arithmetic."""

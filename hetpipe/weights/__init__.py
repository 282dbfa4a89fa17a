"""Weight versions of a stage: storage and arithmetic."""

"""What a run tells about itself: logs, the public history, and the timeline of a pipeline."""

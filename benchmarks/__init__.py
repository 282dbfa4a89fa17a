"""Speed, measured side by side in one run: medians and ratios, never single absolute times."""

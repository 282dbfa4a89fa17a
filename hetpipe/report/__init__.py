"""Text, pages and pictures for people."""

"""`hetpipe render`: what hetpipe does, drawn or written down, without doing it."""

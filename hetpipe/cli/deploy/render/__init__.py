"""`hetpipe render`: schedules, manifests and other files, without running anything."""

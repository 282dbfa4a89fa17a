"""Generated from proto/hetpipe/proto/v2 by scripts/protos."""

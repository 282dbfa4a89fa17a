"""Generated from proto/hetpipe/proto/v1 by scripts/protos."""

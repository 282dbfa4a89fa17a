"""Pure decision logic: events and values in, instructions out. No torch, gRPC, Redis, threads or clocks below here."""

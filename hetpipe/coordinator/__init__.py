"""The cluster's one decider: who is a member, how each job is planned, started, watched and ended."""

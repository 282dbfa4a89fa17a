"""Chaos with real processes (`reliability.md` §4, layer 5): every role is killed or paused at every named failpoint.

How to think about it: a `Cluster` keeps its processes alive and starts again whoever dies; a `Trial` is one witness job
on it; a `Cell` is one fault. Cells run one after the other in one job, two jobs at once: each waits until the fault has
happened and the clock has moved on well beyond it, then the next one begins. At the end of the job the history checker
and the witness weights judge all of its cells together; if they find something, each of them is run again alone.
"""

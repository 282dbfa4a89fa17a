"""The command line, and the shell around a run that `hetpipe.train` shares with it.

How to think about it: `app` says which commands there are and what they take; each command is a function of a module
beside it. `training` carries a run from its job to its result: `supervisor` starts the services of a local run,
`follow` listens until the run has ended, a `View` shows what happens. Only `app` and its helpers need typer.
"""

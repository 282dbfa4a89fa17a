"""The command line.

How to think about it: `app` has the table of all commands, by families as a user meets them. A command is one module,
at the place that its name says: `Options`, what it is asked, and `run`, what it does. `command` makes typer's view of
it, `options` are types of options that several commands share. The services behind `hetpipe serve`, and `hetpipe
health`, have parsers of their own, which `main` calls without typer.
"""

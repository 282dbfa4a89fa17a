"""The command line.

`app` has the table of all commands, grouped into families. A command is one module, whose path follows from its name:
`Options` is its command line, `run` executes it. `command` derives the typer callback, `options` has the types of
options that several commands share. The services behind `hetpipe serve`, and `hetpipe health`, have parsers of their
own, which `main` calls without typer.
"""

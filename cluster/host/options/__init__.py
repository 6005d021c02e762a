"""The options of `up` and `plan`: each is declared once, as a field of `Request`.

The command line, `--help`, run files and docs/reference/options.md are made from these declarations.
"""

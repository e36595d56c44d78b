"""Writers of tables, excerpts and reference pages in docs/.

tables        tables of the pages, from docs/measurements and the cost model; the command that compares and writes
field_rows    the table of fields of HTTP bodies in docs/http_fields.md
excerpts      excerpts of docs/internals.md, from a compilation
api           the site's Python reference and command pages, from docstrings and parsers
mkdocs_hooks  hooks of mkdocs
"""

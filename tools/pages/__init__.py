"""Keeps docs true: each page's tables and excerpts are made by functions and compared by tests.

performance      tables of docs/performance.md and the README, from docs/measurements
quality          docs/quality.md, from docs/measurements
internals        excerpts of docs/internals.md, from a compilation
sizes            what a Llama takes of disk and GPU, for docs/quickstart.md
ranks            several GPUs as one engine and as several, for docs/scaling.md
api              what the site's Python reference and command pages hold, from docstrings and parsers
mkdocs_hooks     what mkdocs does to the pages when it builds the site
excerpts         how a page is compared or written
"""

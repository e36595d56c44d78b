"""Helpers that several tests share; importable as `support` (see `pythonpath` in pyproject.toml)."""

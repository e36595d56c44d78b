"""Command lines of the development tools."""

import argparse


def dev_parser(module: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of `python -m sidestream.tools.dev.MODULE`."""
    form, program = argparse.RawDescriptionHelpFormatter, f"python -m sidestream.tools.dev.{module}"
    return argparse.ArgumentParser(program, description=description, epilog=epilog, formatter_class=form)

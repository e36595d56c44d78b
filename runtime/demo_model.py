"""Paths of the demo model and its adapters. Imports no other module, because every command imports this one."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[1] / "tools" / "demo_model"


def demo_adapters() -> dict[str, Path]:
    """Return name -> directory of the demo model's adapters."""
    return {path.parent.name: path.parent for path in sorted(DEMO_MODEL.glob("adapters/*/adapter_config.json"))}

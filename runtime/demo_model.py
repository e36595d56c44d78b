"""The model that comes with the package, and its adapters. Imports nothing, for the commands start with it."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[1] / "tools" / "demo_model"


def demo_adapters() -> dict[str, Path]:
    """Name -> directory of each of the demo model's adapters."""
    return {path.parent.name: path.parent for path in sorted(DEMO_MODEL.glob("adapters/*/adapter_config.json"))}

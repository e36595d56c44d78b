"""Names of what is found next to a model's weights, and what stands for a name. Does without torch."""

AUTO, OFF = "auto", "off"  # what is found, and nothing

FILE_NAME = "sidestream_calibration.safetensors"


def file_name(precision: str) -> str:
    """Of the rounded weights for a precision."""
    return f"sidestream_rounded_{precision}.safetensors"

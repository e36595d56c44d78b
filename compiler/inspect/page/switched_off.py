"""Why a pass had nothing to do: the option that switches it off."""

from ...options import DEFAULT_LORA_DTYPE, LAYERED, CompileOptions

_QUANTIZING = ("quantize_linears", "fuse_quantize")


def why_off(name: str, options: CompileOptions) -> str:
    """The reason for which the pass `name` does nothing with these options, as `option=value`; "" when it is on."""
    if name in options.disable:
        return f"disable_passes={name}"
    if name in LAYERED and getattr(options, name) is False:
        return f"{name}=False"
    if name == "quantize_kv" and not options.quantizes_kv:
        return f"precision={options.precision}, kv_dtype={options.kv_dtype}"
    if name in _QUANTIZING and not options.quantizes:
        return f"precision={options.precision}"
    if name == "quantize_lora" and not options.quantizes_lora:
        chosen = options.lora_dtype if options.lora_dtype != "auto" else DEFAULT_LORA_DTYPE.get(options.precision)
        return f"precision={options.precision}" + (f", lora_dtype={chosen}" if chosen else "")
    return ""

"""A library that adds in other orders, as it may on a processor that is not there."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
ONE_RESULT = frozenset({aten.silu.default, aten.sigmoid.default})


class OtherKernels(TorchDispatchMode):
    """Sums of floating-point products are in another order for each number of rows and each `variant`, and SiLU and
    sigmoid differ in the last bit at places that depend on the tensor's size: what a library may do on a processor that
    is not there. `products` counts them by dtype.
    """

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.variant = variant
        self.products: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            place = PRODUCTS[func]
            first, second = args[place], args[place + 1]
            if first.is_floating_point() and first.device.type == "cpu":  # not of programs that are being built
                self.products[first.dtype] = self.products.get(first.dtype, 0) + 1
                order = torch.randperm(first.shape[-1], generator=self._generator(first.shape[-2]))
                args = (*args[:place], first[..., order], second[..., order, :], *args[place + 2 :])
        result = func(*args, **kwargs)
        if func in ONE_RESULT:
            changed = torch.rand(result.shape, generator=self._generator(result.numel())) < 0.1
            return torch.where(changed, torch.nextafter(result.float(), result.float() + 1).to(result.dtype), result)
        return result

    def _generator(self, size: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * size + self.variant)

"""The dtypes of quantized tensors, and how far their values reach."""

import torch

QUANTIZED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

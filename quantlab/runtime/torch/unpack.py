"""The packed layers of gptqmodel as plain ones: codes are unpacked once, instead of at each product."""

from __future__ import annotations

from typing import Any

import torch

# The classes of gptqmodel that compute gptq and awq in torch.
_GPTQ, _AWQ = "TorchLinear", "AwqTorchLinear"


def unpack_layers(model: Any) -> None:
    """Put Linear modules of the float32 weights that the codes mean in place of gptqmodel's own, one by one."""
    packed = [(name, module) for name, module in model.named_modules() if type(module).__name__ in (_GPTQ, _AWQ)]
    for name, module in packed:
        bias = None if module.bias is None else torch.nn.Parameter(module.bias.float(), requires_grad=False)
        model.set_submodule(name, linear_of(weight_of(module), bias))


def weight_of(module: Any) -> torch.Tensor:
    """The float32 weight (out_features, in_features) of a layer whose zero points are stored as they are (gptq_v2)."""
    from gptqmodel.nn_modules.qlinear import PackableQuantLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    scales = module.scales
    if type(module).__name__ == _AWQ:
        weight = dequantize_gemm(module.qweight, module.qzeros, scales.float(), module.bits, module.group_size)
        return weight.T.contiguous()
    # It multiplies in the type of the scales. That of the module's own class is compiled, seconds for each shape.
    module.scales = scales.float()
    try:
        return PackableQuantLinear.dequantize_weight(module).T.contiguous()
    finally:
        module.scales = scales


def linear_of(weight: torch.Tensor, bias: torch.nn.Parameter | None) -> torch.nn.Linear:
    """A Linear of these tensors."""
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    made.bias = bias
    return made

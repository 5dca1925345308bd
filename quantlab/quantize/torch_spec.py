"""The options of the torch methods: what each method takes, and its defaults."""

from __future__ import annotations

import msgspec

from quantlab.core.errors import UsageError, unknown_name
from quantlab.core.result import DEVICES, DTYPES
from quantlab.quantize.engines import choose
from quantlab.quantize.spec import QuantizeSpec, refuse_options
from quantlab.quantize.torch_work import SCHEMES, Weights

GROUP_SIZES = (32, 64, 128, -1)
_DEFAULT_GROUP = 128
_BITS = {"gptq": (4, 2, 3, 8), "awq": (4,), "rtn": (4, 8), "int8": (8,)}
# AutoAWQ's artifacts have zero points, AutoGPTQ's have none.
_SYMMETRIC = {"gptq": True, "awq": False, "rtn": True, "int8": True}


def check_torch_spec(spec: QuantizeSpec) -> QuantizeSpec:
    """The spec with the defaults of its method; raises UsageError for what the method does not do."""
    if spec.out.endswith(".gguf"):
        raise UsageError(f"`--out {spec.out}`: `{spec.method}` writes a folder", f"call it `{spec.out[:-5]}`")
    if spec.dtype not in DTYPES:
        raise unknown_name("dtype", spec.dtype, DTYPES)
    if spec.device not in DEVICES:
        raise unknown_name("device", spec.device, DEVICES)
    if spec.method != "gptq":
        refuse_options(spec, ("desc_act",))
    spec = _fp8(spec) if spec.method == "fp8" else _integer(spec)
    if not calibrates(spec):
        refuse_options(spec, ("calib", "calib_samples", "calib_length"), ": it needs no calibration")
    spec = msgspec.structs.replace(spec, engine=choose(spec.method, spec.engine).name)
    _refuse_of_engine(spec)
    return spec


def _refuse_of_engine(spec: QuantizeSpec) -> None:
    """Raise UsageError for what the method has and this engine of it has not."""
    if spec.engine == "autoawq" and (spec.sym or spec.group_size == -1):
        raise UsageError("`autoawq` writes zero points in groups, nothing else", "leave out `--sym`, or its `--engine`")
    if spec.engine == "optimum" and not spec.sym:
        raise UsageError(
            "`optimum` writes zero points as gptq_v2, which vLLM reads as the classic format",
            "leave out `--no-sym`, or use `--engine gptqmodel`",
        )
    if spec.engine == "llmcompressor" and spec.desc_act:
        raise UsageError("`llmcompressor` has no `--desc-act`", "leave it out, or use `--engine gptqmodel`")


def calibrates(spec: QuantizeSpec) -> bool:
    """Whether the method looks at text: plain rounding, and fp8 with scales made at run time, do not."""
    return spec.method in ("gptq", "awq", "int8") or spec.scheme == "static"


def weights(spec: QuantizeSpec) -> Weights | None:
    """How a checked spec stores weights; None for fp8."""
    if spec.bits is None or spec.group_size is None or spec.sym is None:
        return None
    return Weights(spec.bits, spec.group_size, spec.sym, spec.desc_act)


def torch_variant(spec: QuantizeSpec) -> str:
    """The name of a checked spec's variant: AWQ-W4-g128, FP8-dynamic, INT8; what is no default is told."""
    if spec.method == "fp8":
        return f"FP8-{spec.scheme}"
    if spec.method == "int8":
        return "INT8"
    group = "channel" if spec.group_size == -1 else f"g{spec.group_size}"
    kind = "" if spec.sym == _SYMMETRIC[spec.method] else ("-sym" if spec.sym else "-asym")
    engine = "" if spec.engine == choose(spec.method, None).name else f"-{spec.engine}"
    return f"{spec.method.upper()}-W{spec.bits}-{group}{kind}{'-desc_act' if spec.desc_act else ''}{engine}"


def _fp8(spec: QuantizeSpec) -> QuantizeSpec:
    refuse_options(spec, ("bits", "group_size", "sym"), ": `--scheme` says it all")
    scheme = "dynamic" if spec.scheme is None else spec.scheme
    if scheme not in SCHEMES:
        raise unknown_name("scheme", scheme, SCHEMES)
    return msgspec.structs.replace(spec, scheme=scheme)


def _integer(spec: QuantizeSpec) -> QuantizeSpec:
    refuse_options(spec, ("scheme",))
    if spec.method == "int8" and (spec.group_size, spec.sym) not in ((None, None), (-1, True)):
        refuse_options(spec, ("group_size", "sym"), ": its scales are per channel and per token")
    known = _BITS[spec.method]
    bits = known[0] if spec.bits is None else spec.bits
    if bits not in known:
        raise UsageError(f"`{spec.method}` has no {bits} bits", f"it has {', '.join(map(str, sorted(known)))}")
    own = -1 if spec.method == "int8" else _DEFAULT_GROUP
    group = own if spec.group_size is None else spec.group_size
    if group not in GROUP_SIZES:
        raise UsageError(
            f"`--group-size {group}` is no group size",
            f"kernels know {', '.join(map(str, GROUP_SIZES))} (-1: a whole row)",
        )
    sym = _SYMMETRIC[spec.method] if spec.sym is None else spec.sym
    return msgspec.structs.replace(spec, bits=bits, group_size=group, sym=sym)

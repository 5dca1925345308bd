"""What the parent and the children of a torch quantization send each other."""

from __future__ import annotations

from typing import Any

import msgspec

from quantlab.core.corpus import Corpus
from quantlab.core.result import Notice

# How fp8 scales activations: per token as they come, by one calibrated scale, in blocks of 128.
SCHEMES = ("dynamic", "static", "block")

# Tokens of the text that the check compares on, of each of its windows, and of the probe of the engine's model.
CHECK_TOKENS, CHECK_WINDOW_TOKENS, PROBE_TOKENS = 1024, 512, 128
# Tokens whose logits are compared at once: several copies in float64 of a large vocabulary fill gigabytes.
COMPARED_TOKENS = 16

# Tokens that tell awq's search which of some twenty scales is best, by engine (autoawq takes all). All tokens make up
# the mean activation of the channels.
AWQ_SEARCH_TOKENS = {"gptqmodel": 4096, "llmcompressor": 2048}


class Weights(msgspec.Struct, frozen=True):
    """How weights are stored: `group_size` of a row share a scale, -1 for a whole row; `sym`: no zero points.

    `desc_act`: the weights of a group lie anywhere in the row.
    """

    bits: int
    group_size: int
    sym: bool
    desc_act: bool = False


class Samples(msgspec.Struct, frozen=True):
    """Calibration to draw from weighted texts: `samples` (None: what they give, at most 128) of `length` tokens."""

    parts: list[tuple[Corpus, float]]
    samples: int | None
    length: int
    seed: int


class EngineJob(msgspec.Struct, frozen=True):
    """One quantization by one engine, from `folder` into the empty folder `out`.

    `weights` is None for fp8, whose `scheme` says it all. `keep` are full names of Linear modules that stay in 16
    bits. `probe` is the file that receives the logits of the model in memory on the probe
    (quantize/torch_model.py: write_probe), before or after the save, as long as they are those of the quantized model.
    `state` is the folder (quantize/torch_state.py) where finished layers are kept, and continued from.
    """

    method: str
    folder: str
    out: str
    probe: str
    keep: list[str]
    device: str
    dtype: str
    threads: int
    seed: int
    weights: Weights | None = None
    scheme: str | None = None
    calibration: Samples | None = None
    state: str | None = None


class EngineDone(msgspec.Struct):
    """What the engine did. `engine_s` is the engine's own call, as a bare script would make it: calibrate and quantize.

    `layers` are the Linear modules that are quantized now; `losses` what the engine says of each (module -> its own
    error, where it has one); `calibration` the record of quantize/calibration.py. `continued_after`: so many layers
    were finished by an earlier run, and times and memory are those of the rest.
    """

    engine_s: float
    layers: list[str]
    losses: dict[str, float] = {}
    stages_s: dict[str, float] = {}
    calibration: dict[str, Any] | None = None
    peak_process_bytes: int = 0
    peak_device_bytes: int = 0
    continued_after: int = 0
    notices: list[Notice] = []


class CheckJob(msgspec.Struct, frozen=True):
    """An artifact to look at in a fresh process: `folder` is its parent, `probe` what the engine's model computed."""

    method: str
    folder: str
    artifact: str
    probe: str
    device: str
    threads: int
    weights: Weights | None = None


class Checked(msgspec.Struct):
    """`fault`: why the artifact must not be used, or None.

    Mean KL divergences in nats: from the model in the engine's memory (on the probe), from the parent, and of plain
    rounding at the same bits from the parent (None for fp8 and int8; both on the built-in evaluation text). The blocks
    are the means of 64 neighbouring tokens each, paired: what says how certain the last two are.
    """

    fault: str | None = None
    kld_engine: float = 0.0
    kld_parent: float = 0.0
    kld_rounding: float | None = None
    kld_parent_blocks: list[float] = []
    kld_rounding_blocks: list[float] = []
    peak_process_bytes: int = 0
    peak_device_bytes: int = 0
    stages_s: dict[str, float] = {}
    notices: list[Notice] = []

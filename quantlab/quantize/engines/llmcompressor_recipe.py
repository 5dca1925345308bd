"""What llm-compressor is asked to do, and where its modifiers are amended.

SmoothQuant: arXiv 2211.10438. AWQ: arXiv 2306.00978. GPTQ: arXiv 2210.17323. FP8 is E4M3: arXiv 2209.05433.
"""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQ_MAPPING_REGISTRY, AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantScale
from llmcompressor.modifiers.transform.smoothquant.utils import MAPPINGS_REGISTRY

from quantlab.core.errors import QuantlabError
from quantlab.quantize.torch_work import AWQ_SEARCH_TOKENS, EngineJob

_FP8_PRESETS = {"dynamic": "FP8_DYNAMIC", "static": "FP8", "block": "FP8_BLOCK"}
# Between activations (1) and weights (0). Nothing repairs the activations, so the norms give much; `down_proj` gives
# less: on the demo model rounded weights after 0.8 there double the divergence (0.024 against 0.011).
_SMOOTHING, _DOWN_SMOOTHING = 0.8, 0.5
_INPUT_NORM = (["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"], "re:.*input_layernorm$")
# Gemma 2 and 3: what follows the attention's norm is a sum, not the feed-forward; the library's own table breaks them.
_GEMMA = (["re:.*gate_proj$", "re:.*up_proj$"], "re:.*pre_feedforward_layernorm$")
_DOWN = (["re:.*mlp.down_proj$"], "re:.*mlp.up_proj$")


def recipes(job: EngineJob, model: Any) -> list[list[Any]]:
    """The modifiers of each call of the engine, in order; modules in `job.keep` and the head stay as they are."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is head]
    config: dict[str, Any] = {"config_groups": {"group_0": _scheme(job)}, "ignore": sorted({*job.keep, *names})}
    if job.method == "int8":
        mappings = _smoothed(model)
        smooth = [[Smooth(mappings=mappings)]] if mappings else []
        return [*smooth, [GPTQModifier(**config)]]
    if job.method == "gptq" or job.scheme == "static":
        return [[GPTQModifier(**config)]]
    if job.method == "awq":
        if type(model).__name__ not in AWQ_MAPPING_REGISTRY:
            raise QuantlabError(
                f"llmcompressor's awq does not know `{type(model).__name__}`", "use `--engine gptqmodel`, or gptq"
            )
        return [[Awq(), QuantizationModifier(**config)]]
    return [[QuantizationModifier(**config)]]


def _scheme(job: EngineJob) -> QuantizationScheme:
    if job.method == "fp8":
        return preset_name_to_scheme(_FP8_PRESETS[str(job.scheme)], ["Linear"])
    if job.method == "int8":
        return preset_name_to_scheme("W8A8", ["Linear"])
    assert job.weights is not None
    grouped = job.weights.group_size > 0
    weights = QuantizationArgs(
        num_bits=job.weights.bits,
        type="int",
        symmetric=job.weights.sym,
        strategy="group" if grouped else "channel",
        group_size=job.weights.group_size if grouped else None,
        # Ranges of the least error help GPTQ (KL 0.070 against 0.084 of the demo model's first layers), not AWQ.
        observer="memoryless_mse" if job.method == "gptq" else None,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def _smoothed(model: Any) -> list[Any]:
    """(Linear modules, what their input comes from) to balance; nothing for an architecture that is not known."""
    mappings = list(MAPPINGS_REGISTRY.get(type(model).__name__, []))
    names = [name for name, _ in model.named_modules()]
    if any(name.endswith("pre_feedforward_layernorm") for name in names):
        mappings = [_INPUT_NORM, _GEMMA]
    if mappings and any(name.endswith("mlp.up_proj") for name in names):
        mappings.append(_DOWN)
    return mappings


class Smooth(SmoothQuantModifier):
    """SmoothQuant that looks at what goes into the Linear modules: for `down_proj` that is not what `up_proj` gives."""

    def _setup_scale_hooks(self) -> None:
        for mapping in self.resolved_mappings_:
            self.register_hook(mapping.balance_layers[0], self._range_of(mapping.smooth_name), "forward_pre")

    def _calculate_smoothing_scales(self, balance_layers: list[Any], activation_scales: Any) -> Any:
        source = next(m.smooth_layer for m in self.resolved_mappings_ if m.balance_layers[0] is balance_layers[0])
        self.smoothing_strength = _DOWN_SMOOTHING if source.weight.ndim == 2 else _SMOOTHING
        return super()._calculate_smoothing_scales(balance_layers, activation_scales)

    def _range_of(self, name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            values = args[0].flatten(0, -2)
            low, high, seen = values.amin(0), values.amax(0), self.scales_.get(name)
            if seen is not None:
                low, high = low.minimum(seen.min_channel_vals), high.maximum(seen.max_channel_vals)
            self.scales_[name] = SmoothQuantScale(min_channel_vals=low, max_channel_vals=high)

        return hook


class Awq(AWQModifier):
    """AWQ that tries its scales on a part of the samples, and scales nothing for modules that stay in 16 bits."""

    def _set_resolved_mappings(self, model: Any) -> None:
        super()._set_resolved_mappings(model)
        # Where all of them stay, the library divides by zero.
        self._resolved_mappings: list[Any] = [
            mapping
            for mapping in self._resolved_mappings
            if any(hasattr(layer, "quantization_scheme") for layer in mapping.balance_layers)
        ]

    def _apply_smoothing(self, model: Any) -> None:
        for cache in self._parent_args_cache.values():
            batches = cache.batch_intermediates
            if batches:
                del batches[max(1, AWQ_SEARCH_TOKENS["llmcompressor"] // _tokens(batches[0])) :]
        super()._apply_smoothing(model)


def _tokens(batch: dict[str, Any]) -> int:
    """How many tokens went into a module at one call: its first tensor is (batch, tokens, channels)."""
    first = next(kept.value for kept in batch.values() if getattr(kept.value, "ndim", 0) == 3)
    return int(first.shape[0] * first.shape[1])

"""Models whose layers attend differently, as gemma3's: sliding and full attention, each with its own mask and rope.

gptqmodel and optimum run the layers one by one, with the mask and the positions that the first layer was given.
"""

from __future__ import annotations

import inspect
from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"


def give_own_inputs(model: Any) -> None:
    """Let every attention module compute its mask and positions itself, where the layers of `model` differ.

    For whole sequences without padding.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if set(kinds) != {_SLIDING, _FULL}:
        return
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None and hasattr(module, "o_proj"):
            kind = kinds[module.layer_idx]
            module.register_forward_pre_hook(_OwnInputs(config, rotary, kind), with_kwargs=True)


class _OwnInputs:
    """The hook of one attention module."""

    def __init__(self, config: Any, rotary: Any, kind: str) -> None:
        self._config, self._rotary, self._kind = config, rotary, kind
        self._typed = "layer_type" in inspect.signature(rotary.forward).parameters

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        import torch
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        hidden = args[0] if args else kwargs["hidden_states"]
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        typed = (self._kind,) if self._typed else ()
        mask = create_sliding_window_causal_mask if self._kind == _SLIDING else create_causal_mask
        return args, kwargs | {
            "position_embeddings": self._rotary(hidden, positions, *typed),
            "attention_mask": mask(
                config=self._config,
                inputs_embeds=hidden,
                attention_mask=None,
                past_key_values=None,
                position_ids=positions,
            ),
        }

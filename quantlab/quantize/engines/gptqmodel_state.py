"""Keeps gptqmodel's finished layers on disk, and puts them back in a later process (quantize/torch_state.py).

gptqmodel's own checkpoints know two model types and no excluded modules, want all modules on disk, and read all that
is finished again and again at each layer. This is an extension of its loop instead (gptqmodel/looper/extension.py):
after each layer the packed modules and what goes into the next layer are written, while the next layer is under way.
What else the loop holds it computes again from the same text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quantlab.core.errors import QuantlabError
from quantlab.core.files import locked, sha256_file
from quantlab.core.result import Notice
from quantlab.quantize import torch_markers, torch_state
from quantlab.quantize.torch_markers import Finished


class Layers:
    """The extension of one run. `first` is the layer that it begins with; `dense` the modules before that, unpacked.

    `notices` says why layers are not kept, where they are not.
    """

    def __init__(self, folder: Path, calibration: str, dtype: Any, writer: ThreadPoolExecutor) -> None:
        self.notices: list[Notice] = []
        self.dense: dict[str, Any] = {}
        self._folder, self._calibration, self._dtype, self._writer = folder, calibration, dtype, writer
        self._written: Future[None] | None = None
        self._finished = torch_markers.read(folder)
        if self._finished is not None and self._finished.calibration != calibration:
            raise torch_markers.stale(folder, "other calibration tokens")
        self.first = self._finished.layers if self._finished else 0
        self._files: dict[str, str] = {}

    def on_start(self, context: Any) -> int:
        """Called by the loop when it has the inputs of the first layer; returns the layer to begin with."""
        from safetensors import SafetensorError

        self._model, self._processor, self._shared = context.model, context.processors[0], context.shared_state
        self._of = len(context.plan.steps)
        if self._finished is not None:
            try:
                self._restore(self._finished)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, OSError, SafetensorError) as error:
                said = " ".join(f"{type(error).__name__}: {error}".split())
                raise torch_markers.damaged(self._folder, said) from error
        return self.first

    def on_boundary(self, boundary: Any) -> None:
        """Called by the loop after each layer, whose packing may still be under way."""
        self.settle()
        # What some models hand from layer to layer beside the inputs is not kept.
        if self._shared or self.notices:
            return
        inputs = [list(batch) for batch in self._processor.inputs_cache.layer_inputs]
        step, log = boundary.step, list(self._processor.log)
        self._written = self._writer.submit(self._write, step.index, step.name, boundary._futures, inputs, log)

    def settle(self) -> None:
        """Wait for what is being written."""
        from safetensors import SafetensorError

        if self._written is None:
            return
        try:
            self._written.result()
        except (OSError, QuantlabError, SafetensorError) as error:
            # A full disk may yet have room for the artifact.
            torch_state.empty(self._folder)
            self.notices.append(Notice("layers-not-kept", f"finished layers could not be kept: {error}"))
        self._written = None

    def _write(self, index: int, name: str, packing: Any, inputs: list[list[Any]], log: list[dict[str, Any]]) -> None:
        import torch
        from gptqmodel.looper.checkpoint_modules import is_packed_module, packed_module_spec
        from safetensors.torch import save_file

        for future in packing:
            future.result()
        layer = self._model.model.get_submodule(name)
        config = self._model.quantize_config
        packed = {
            f"{name}.{key}": packed_module_spec(module, config)
            for key, module in layer.named_modules()
            if is_packed_module(module)
        }
        with torch.inference_mode():
            # Cloned: modules with the same inputs may share tensors, which the format does not have.
            tensors = {key: value.detach().cpu().clone().contiguous() for key, value in layer.state_dict().items()}
            following = {
                f"{i}.{j}": value.detach().cpu().contiguous()
                for i, batch in enumerate(inputs)
                for j, value in enumerate(batch)
            }
        this, before, after = (
            f"layer-{index}.safetensors",
            f"inputs-{index}.safetensors",
            f"inputs-{index + 1}.safetensors",
        )
        save_file(tensors, self._folder / this, {"layer": name, "packed": json.dumps(packed)})
        save_file(following, self._folder / after)
        self._files.pop(before, None)
        self._files |= {file: sha256_file(self._folder / file) for file in (this, after)}
        finished = Finished(
            index + 1, self._of, self._files, self._calibration, json.loads(json.dumps(log, default=str))
        )
        torch_markers.write(self._folder, finished)
        for path in self._folder.glob("*.safetensors"):
            if path.name not in self._files:
                path.unlink()

    def _restore(self, finished: Finished) -> None:
        import torch
        from safetensors import safe_open

        self._files = dict(finished.files)
        for file in finished.files:
            # The loop runs in inference mode, whose tensors are of no use outside of it.
            with torch.inference_mode(mode=False), safe_open(self._folder / file, framework="pt") as stored:
                tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 - no dict
                about = stored.metadata()
            if file.startswith("inputs"):
                self._continue_from(tensors)
            else:
                self._put_back(about["layer"], json.loads(about["packed"]), tensors)
        self._processor.log = list(finished.log)

    def _put_back(self, layer: str, packed: dict[str, dict[str, Any]], tensors: dict[str, Any]) -> None:
        from gptqmodel.looper.checkpoint_modules import restore_packed_module

        model = self._model
        for name, spec in packed.items():
            module = restore_packed_module(
                spec,
                name=name,
                config=model.quantize_config,
                kernel=model.qlinear_kernel,
                lm_head_name=model.lm_head,
            )
            within = name.removeprefix(f"{layer}.") + "."
            own = {key: tensors.pop(key) for key in list(tensors) if key.startswith(within)}
            module.load_state_dict({key.removeprefix(within): value for key, value in own.items()}, assign=True)
            model.model.set_submodule(name, module)
            self.dense[name] = _unpacked(module, self._dtype)
        # AWQ changes norms too, and modules that are not packed.
        wrong = model.model.get_submodule(layer).load_state_dict(tensors, strict=False, assign=True)
        if wrong.unexpected_keys:
            raise KeyError(wrong.unexpected_keys[0])

    def _continue_from(self, tensors: dict[str, Any]) -> None:
        if self.first == self._of:
            return
        given = self._processor.inputs_cache.layer_inputs
        device = given[0][0].device
        inputs = [[tensors[f"{i}.{j}"].to(device) for j in range(len(batch))] for i, batch in enumerate(given)]
        self._processor.receive_layer_inputs(inputs)


def _unpacked(module: Any, dtype: Any) -> Any:
    """The Linear that a packed module means, of weights computed in float32."""
    import torch
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    from quantlab.runtime.torch.unpack import linear_of, weight_of

    zeros = module.qzeros
    if not isinstance(module, AwqTorchLinear):
        # The format has zero points less one.
        module.qzeros = zeros.clone()
        convert_gptq_v1_to_v2_format_module(module, module.bits, module.pack_dtype)
    weight = weight_of(module).to(dtype)
    module.qzeros = zeros
    bias = None if module.bias is None else torch.nn.Parameter(module.bias.to(dtype), requires_grad=False)
    return linear_of(weight, bias)


@contextlib.contextmanager
def kept(folder: Path, calibration: str, dtype: Any) -> Iterator[Layers]:
    """Give gptqmodel's loop the extension; `calibration` is the sha256 of the token ids."""
    from gptqmodel.looper import module_looper

    looper = module_looper.ModuleLooper
    # A killed run's engine may live for an instant longer than its parent, whose lock the next one has.
    with locked(folder / torch_state.ENGINE_LOCK), ThreadPoolExecutor(1) as writer:
        layers = Layers(folder, calibration, dtype, writer)

        class Extended(looper):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **(kwargs | {"extensions": (layers,)}))

        module_looper.ModuleLooper = Extended
        try:
            yield layers
            layers.settle()
        finally:
            module_looper.ModuleLooper = looper

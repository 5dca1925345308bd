"""The importance matrix: for each input column of a weight, the sum of the squared activations it met.

Collected in process by a callback on every matrix product, as llama-imatrix does: windows from an empty context,
logits of every token (without them the last block's feed-forward is skipped), products of fewer than 16 tokens
ignored, experts counted one by one. Written in llama.cpp's GGUF form, so that llama-quantize reads it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantlab.core.errors import QuantlabError
from quantlab.core.progress import Progress
from quantlab.quantize.llama_model import LlamaModel, lib

_MIN_TOKENS = 16
_F32 = 0
_MAX_DIMS, _MAX_SRC, _OP_PARAMS, _MAX_NAME = 4, 10, 16, 64

Floats = npt.NDArray[np.float32]


class _Tensor(ctypes.Structure):
    """ggml_tensor of the bundled ggml.h, up to its name."""


_Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * _MAX_DIMS),
    ("nb", ctypes.c_size_t * _MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * _OP_PARAMS),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * _MAX_SRC),
    ("view_src", ctypes.POINTER(_Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * _MAX_NAME),
]


def _ggml(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(lib._lib, name)
    function.restype, function.argtypes = result, arguments
    return function


_op_name = _ggml("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
_is_host = _ggml("ggml_backend_buffer_is_host", ctypes.c_bool, ctypes.c_void_p)
_get = _ggml(
    "ggml_backend_tensor_get", None, ctypes.POINTER(_Tensor), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class Entry:
    """Sums of squares float32 (matrices, columns) of one weight, and tokens counted: one count, or one an expert."""

    def __init__(self, matrices: int, columns: int, counts: int) -> None:
        self.sums = np.zeros((matrices, columns), np.float32)
        self.counts = np.zeros(counts, np.int64)

    def add(self, matrix: int, rows: Floats) -> None:
        """Add the squares of `rows` (tokens, columns), row after row in float32, in the order llama-imatrix adds."""
        squares = np.empty((len(rows) + 1, rows.shape[1]), np.float32)
        squares[0] = self.sums[matrix]
        with np.errstate(over="ignore"):
            np.multiply(rows, rows, out=squares[1:])
        np.add.reduce(squares, axis=0, out=self.sums[matrix])

    def mean(self) -> Floats:
        """What llama_model_quantize takes: the mean square of each column, 1 where an expert met no token."""
        counts = self.counts.astype(np.float32)[:, None]
        sums = self.sums.reshape(len(self.counts), -1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(counts > 0, sums / counts, np.float32(1)).ravel()


class Collector:
    """The callback's memory: an Entry a weight."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.error: str | None = None
        self.callback = lib.ggml_backend_sched_eval_callback(self._see)
        self._ops: dict[int, str] = {}

    def _see(self, address: int, ask: bool, _: Any) -> bool:
        """Called by the scheduler: first whether a tensor is wanted, then with its inputs computed."""
        tensor = _Tensor.from_address(address)
        op = self._ops.get(tensor.op)
        if op is None:
            op = self._ops[tensor.op] = _op_name(tensor.op).decode()
        if ask:
            return op == "MUL_MAT_ID" or (op == "MUL_MAT" and self._wanted(tensor))
        if self.error is None:
            # An exception must not pass through C.
            try:
                self._experts(tensor) if op == "MUL_MAT_ID" else self._dense(tensor)
            except Exception as error:
                self.error = f"{error}"
        return self.error is None

    @staticmethod
    def _wanted(tensor: _Tensor) -> bool:
        inputs = tensor.src[1].contents
        return (
            inputs.ne[1] >= _MIN_TOKENS
            and inputs.type == _F32
            and _weight_name(tensor.src[0].contents).startswith("blk.")
        )

    def _entry(self, name: str, matrices: int, columns: int, counts: int) -> Entry:
        entry = self.entries.setdefault(name, Entry(matrices, columns, counts))
        if entry.sums.shape != (matrices, columns):
            raise ValueError(f"`{name}` has the size {(matrices, columns)}, before {entry.sums.shape}")
        return entry

    def _dense(self, tensor: _Tensor) -> None:
        weight, x = tensor.src[0].contents, _array(tensor.src[1].contents, np.float32)
        w2, w3 = weight.ne[2], weight.ne[3]
        name = _weight_name(weight)
        entry = self._entry(name, w2 * w3, x.shape[3], 1)
        for i3 in range(x.shape[0]):
            for i2 in range(x.shape[1]):
                entry.add((i3 % w3) * w2 + i2 % w2, x[i3, i2])
        entry.counts += x.shape[0] * x.shape[1] * x.shape[2] // (w2 * w3)
        self._check(name, entry)

    def _experts(self, tensor: _Tensor) -> None:
        weight = tensor.src[0].contents
        x = _array(tensor.src[1].contents, np.float32)[0]
        ids = _array(tensor.src[2].contents, np.int32)[0, 0]
        n_experts = weight.ne[2]
        name = _weight_name(weight)
        entry = self._entry(name, n_experts, x.shape[2], n_experts)
        for used in range(ids.shape[1]):
            rows = x[:, used % x.shape[1]]
            for expert in np.unique(ids[:, used]):
                chosen = rows[ids[:, used] == expert]
                entry.add(int(expert), chosen)
                entry.counts[expert] += len(chosen)
        self._check(name, entry)

    @staticmethod
    def _check(name: str, entry: Entry) -> None:
        if not np.isfinite(entry.sums).all():
            raise ValueError(f"the activations that enter `{name}` are not finite: the model's weights are broken")


def _weight_name(tensor: _Tensor) -> str:
    """The weight's name without what the scheduler puts around it: `CUDA0#blk.0.attn_k.weight#0`."""
    name: str = tensor.name.decode("utf-8", "replace")
    parts = name.split("#")
    return parts[1] if len(parts) > 1 else name


def _array(tensor: _Tensor, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The tensor's values, slowest dimension first; a view where it lies in host memory, else a copy."""
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    if _is_host(tensor.buffer):
        memory = (ctypes.c_uint8 * span).from_address(tensor.data)
    else:
        memory = (ctypes.c_uint8 * span)()
        _get(ctypes.byref(tensor), memory, 0, span)
    return np.ndarray(shape, dtype, memory, 0, strides)


def collect(path: Path, windows: npt.NDArray[np.int32], *, threads: int, progress: Progress) -> dict[str, Entry]:
    """Run the windows, int32 (windows, tokens), through the model at `path` and return an Entry a weight.

    Raises QuantlabError where an activation is not finite, and for windows longer than the model's context.
    """
    collector = Collector()
    with LlamaModel(path, n_ctx=windows.shape[1], threads=threads, on_tensor=collector.callback) as model:
        if windows.shape[1] > model.n_ctx_train:
            raise QuantlabError(
                f"samples of {windows.shape[1]} tokens are longer than the model's context of {model.n_ctx_train}",
                "give a smaller `--calib-length`",
            )
        for i, window in enumerate(windows):
            progress("importance matrix", i, len(windows))
            model.logits(window.tolist())
            if collector.error:
                raise QuantlabError(collector.error, "check the model with `quantlab inspect`")
        progress("importance matrix", len(windows), len(windows))
    if not collector.entries:
        raise QuantlabError(
            f"`{path.name}` has no matrix product that an importance matrix serves", "leave out `--imatrix`"
        )
    return dict(sorted(collector.entries.items()))


def write(path: Path, entries: dict[str, Entry], *, datasets: list[str], windows: int, n_ctx: int) -> None:
    """Write the matrix at `path`, a passing name, in the form that llama-quantize and llama-imatrix read.

    Raises QuantlabError where the disk is full.
    """
    import gguf

    class Writer(gguf.GGUFWriter):  # type: ignore[misc, unused-ignore]
        def add_architecture(self) -> None:
            """An importance matrix has no architecture."""

    writer = Writer(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", datasets)
    writer.add_uint32("imatrix.chunk_count", windows)
    writer.add_uint32("imatrix.chunk_size", n_ctx)
    for name, entry in entries.items():
        n = len(entry.counts)
        # ggml drops a last dimension of 1.
        writer.add_tensor(f"{name}.in_sum2", entry.sums.reshape((n, -1) if n > 1 else -1))
        writer.add_tensor(f"{name}.counts", entry.counts.astype(np.float32).reshape((n, 1) if n > 1 else -1))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as error:
        raise QuantlabError(
            f"the importance matrix could not be written in `{path.parent}`: {error}",
            "free some room, or choose another place with `--out`",
        ) from error

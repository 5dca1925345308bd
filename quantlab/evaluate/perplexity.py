"""Perplexity, bits per byte, and against a parent the divergence; on any backend, in a process of its own.

Perplexity is exp of the mean loss in nats over all scored tokens. Two rows compare only where protocol, sizes and
token ids are the same (`token_hash`). It does not say how well a model answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quantlab.core.artifact import model_info, read_record
from quantlab.core.corpus import Corpus, load_text
from quantlab.core.errors import QuantlabError
from quantlab.core.files import sha256_text
from quantlab.core.model import ModelFile
from quantlab.core.progress import Progress, silent
from quantlab.core.result import Measurement, Notice, Outcome, RuntimeInfo
from quantlab.core.statistics import median, percentile
from quantlab.evaluate.parent import of_models, of_runtimes
from quantlab.evaluate.protocols import Protocol
from quantlab.evaluate.spec import PplSpec
from quantlab.runtime.worker import Channel, Worker

if TYPE_CHECKING:
    from quantlab.evaluate.divergence import Floats
    from quantlab.evaluate.likelihood import Against
    from quantlab.runtime.backend import Backend, Loaded, Tokens

# The fastest of 64 to 512 for prefill on a CPU, and as many rows of logits at most.
_STEP_TOKENS = 512

_MAX_EXPONENT = 700.0  # exp of more is no float64


class Job(msgspec.Struct, frozen=True):
    """What the child receives: the spec, and the text in the protocol's form."""

    spec: PplSpec
    text: str


class Measured(msgspec.Struct, frozen=True):
    """What the child sends back: the part of an Outcome that needs the model."""

    runtime: RuntimeInfo
    measurements: dict[str, Measurement]
    warnings: list[Notice]
    details: dict[str, Any]


def run(spec: PplSpec, progress: Progress = silent) -> Outcome:
    """Measure one model.

    Raises UsageError for sizes that leave nothing to score; QuantlabError for a text of less than one window, a file
    that does not load, logits that are not finite, a parent with other tokens.
    """
    protocol = Protocol.of(spec)
    corpus = load_text(spec.data, "evaluation", offline=spec.offline)
    text = protocol.text(corpus)
    with Worker("quantlab.evaluate.perplexity:work", msgspec.to_builtins(Job(spec, text)), progress) as worker:
        # Read while the child starts.
        model = model_info(spec.model)
        parent = model_info(spec.against) if spec.against else None
        measured = msgspec.convert(worker.result(), Measured)
    windows, available = measured.details["windows"], measured.details["windows_available"]
    details = {
        "data": corpus.name,
        "data_label": corpus.name + _part(windows, available),
        "data_sha256": corpus.sha256,
        "canonical": corpus.canonical,
        "text_hash": sha256_text(text),
        **measured.details,
    }
    notes = corpus.notes or calibrated_on(spec.model, corpus)
    warnings = [*notes, *measured.warnings]
    if spec.against is not None and parent is not None:
        details["against_model"] = msgspec.to_builtins(parent)
        warnings += of_models((spec.model.label, spec.against.label), model, parent)
    return Outcome(spec.model.label, model, measured.runtime, measured.measurements, warnings, details)


def calibrated_on(model: ModelFile, corpus: Corpus) -> list[Notice]:
    """`calibration-text` where the record of an artifact names this text, which may be anybody's own."""
    record = read_record(Path(model.path))
    if record is None or corpus.sha256 not in msgspec.json.encode(record.calibration).decode():
        return []
    return [
        Notice(
            "calibration-text",
            f"`{model.label}` was calibrated on `{corpus.name}`: it looks better there than it is",
            "measure on `wikitext2`, or on another text of your own",
        )
    ]


def _part(windows: int, available: int | None) -> str:
    if windows == available:
        return ""
    of_all = "" if available is None else f" of {available}"
    return f" (first {windows}{of_all} window{'s' if (available or windows) > 1 else ''})"


def work(job: Any, channel: Channel) -> Measured:
    """The child: open model and parent, measure."""
    from quantlab.runtime.backend import Capacity
    from quantlab.runtime.loading import opened

    job = msgspec.convert(job, Job)
    spec, protocol = job.spec, Protocol.of(job.spec)
    n_batch = min(_STEP_TOKENS, protocol.n_ctx)
    capacity = Capacity(
        n_ctx=protocol.n_ctx,
        n_batch=n_batch,
        n_ubatch=n_batch,
        n_outputs=min(n_batch, protocol.n_ctx - protocol.first_scored),
        shared=False,
    )
    with contextlib.ExitStack() as stack:

        def load(model: ModelFile) -> Backend:
            path = Path(model.path)
            # A model of torch beside one of llama.cpp: the types of a GGUF file are its own.
            dtype = spec.dtype if path.is_dir() else "auto"
            return stack.enter_context(
                opened(path, capacity, device=spec.device, dtype=dtype, threads=spec.threads, exact=True)
            )

        channel.progress("loading", 0, 1)
        model = load(spec.model)
        parent = load(spec.against) if spec.against else None
        return measure(spec, job.text, model, parent, channel.progress)


def measure(spec: PplSpec, text: str, model: Backend, parent: Backend | None, progress: Progress) -> Measured:
    """Measure a loaded model, and against a loaded parent, on `text` in the protocol's form."""
    from quantlab.evaluate.divergence import require_same_tokens, require_same_vocabulary
    from quantlab.evaluate.likelihood import score

    protocol, loaded = Protocol.of(spec), model.describe()
    ids, whole = protocol.encode(model, text)
    if parent is not None and spec.against is not None:
        names = (spec.model.label, spec.against.label)
        require_same_vocabulary(model, parent, names)
        require_same_tokens(ids, protocol.encode(parent, text)[0], names)
    bos = loaded.bos if loaded.adds_bos else None
    windows = protocol.windows(ids, bos)
    available = len(windows) if whole else None
    windows = windows[: spec.limit]
    scores = score(windows, protocol.first_scored, model, parent, progress)
    warnings = _warnings(windows.shape[1], loaded)
    measurements = _likelihood(scores.loss, _scored_bytes(model, windows[:, protocol.first_scored :]))
    details: dict[str, Any] = {
        "protocol": protocol.name,
        "n_ctx": protocol.n_ctx,
        "stride": protocol.stride,
        "windows": len(windows),
        "windows_available": available,
        "scored_tokens": scores.loss.size,
        "bos": protocol.bos_rule(bos),
        "token_hash": _token_hash(windows),
        "peak_process_bytes": model.memory().process_peak,
    }
    if scores.against is not None and spec.against is not None and parent is not None:
        measurements |= divergence_measurements(scores.against)
        # Window by window, so that the two perplexities can be compared in pairs.
        measurements["against_nll"] = Measurement("nat", "none", scores.against.parent_loss.mean(axis=1).tolist())
        ran = parent.describe().runtime
        agreement = float(scores.against.agree.mean())
        details |= {
            "against": {"label": spec.against.label, "sha256": spec.against.sha256},
            "against_ppl": _perplexity(scores.against.parent_loss),
            "against_runtime": msgspec.to_builtins(ran),
            # The standard error of a share of independent tokens.
            "top1_agreement_stderr": math.sqrt(agreement * (1 - agreement) / max(1, scores.loss.size - 1)),
        }
        warnings += of_runtimes(loaded.runtime, ran)
    return Measured(loaded.runtime, measurements, warnings, details)


def _likelihood(loss: Floats, scored_bytes: int) -> dict[str, Measurement]:
    """Perplexity and its kin from nats per token, (windows, scored tokens).

    `ppl_stderr` is the standard error that llama-perplexity prints: of the mean over tokens, taken as independent.
    """
    ppl = _perplexity(loss)
    found = {
        "ppl": Measurement("1", "lower", [ppl]),
        "nll": Measurement("nat", "lower", loss.mean(axis=1).tolist()),
    }
    if loss.size > 1:
        found["ppl_stderr"] = Measurement("1", "none", [ppl * float(loss.std()) / math.sqrt(loss.size - 1)])
    if scored_bytes:
        found["bits_per_byte"] = Measurement("bit", "lower", [float(loss.sum()) / math.log(2) / scored_bytes])
    return found


def _perplexity(loss: Floats) -> float:
    mean = float(loss.mean())
    if mean > _MAX_EXPONENT:
        raise QuantlabError(
            f"the mean loss of {mean:.0f} nats per token is no language model's",
            "the file is damaged or its quantization failed: write it again, or try another type",
        )
    return math.exp(mean)


def divergence_measurements(against: Against) -> dict[str, Measurement]:
    """Divergence per token, (windows, scored tokens): the mean and the agreement a window, the tail over all tokens."""
    tokens = against.kld.ravel().tolist()
    return {
        "kld_mean": Measurement("nat", "lower", against.kld.mean(axis=1).tolist()),
        "kld_median": Measurement("nat", "lower", [median(tokens)]),
        "kld_p99": Measurement("nat", "lower", [percentile(tokens, 99)]),
        "kld_max": Measurement("nat", "lower", [max(tokens)]),
        "top1_agreement": Measurement("1", "higher", against.agree.mean(axis=1).tolist()),
    }


def _scored_bytes(model: Backend, scored: Tokens) -> int:
    """The UTF-8 bytes that the scored tokens stand for."""
    import numpy as np

    ids, counts = np.unique(scored, return_counts=True)
    return sum(len(model.piece_bytes(token)) * n for token, n in zip(ids.tolist(), counts.tolist(), strict=True))


def _token_hash(windows: Tokens) -> str:
    """The sha256 of the ids fed, window after window, as 32-bit little-endian integers."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(window.astype("<i4").tobytes())
    return digest.hexdigest()


def _warnings(n_ctx: int, loaded: Loaded) -> list[Notice]:
    if not loaded.beyond_training(n_ctx):
        return []
    return [
        Notice(
            "n-ctx-beyond-training",
            f"windows of {n_ctx} tokens; the model was trained on {loaded.n_ctx_train}",
            f"use `--n-ctx {loaded.n_ctx_train}`, and compare only with rows of that size",
        )
    ]

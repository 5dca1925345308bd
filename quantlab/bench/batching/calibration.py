"""The run that the step model of `--simulate` is fitted to."""

from __future__ import annotations

import msgspec

from quantlab.bench.batching import batch_sizes, open_loop
from quantlab.bench.batching.load import Asked, Lengths
from quantlab.bench.batching.serve import Calibrated, Cell, Run
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.target import EngineTarget
from quantlab.bench.batching.theory import saturated
from quantlab.core.progress import Progress

# Requests of each load, beside batches that decode.
_REQUESTS = 24
# Of the capacity. A step amid others of its kind is some 4% faster than among arrivals, idle times and prompts.
_LOAD = 0.7
# Kernels take rows by fours or eights: up to here each batch has a cost of its own.
_EVERY_BATCH = 16


def calibrate(spec: BatchingSpec, drawn: Lengths, engine: EngineTarget, progress: Progress) -> Calibrated:
    """The step model of a short run: a saturated and an open load, and batches up to the largest (each up to 16)."""
    first = Lengths(drawn.prompt[:_REQUESTS], drawn.new[:_REQUESTS], drawn.gaps[:_REQUESTS])
    at_once = open_loop.saturate(spec, first)
    assert engine.loaded is not None
    batches = _batches(engine.loaded.capacity.n_seq) * spec.repeats
    done = 0

    def run(cell: Cell) -> Run:
        nonlocal done
        found = engine.run(cell)
        done += 1
        progress("fitting the step model", done, 3 + len(batches))
        return found

    # The first load warms up, and its steps are not counted.
    run(msgspec.structs.replace(at_once, requests=at_once.requests[:2]))
    mu = saturated(run(at_once).records, spec.max_num_seqs).mu
    run(open_loop.alone(open_loop.cell(spec, first, _LOAD * mu, policy="fcfs")))
    asked = Asked(spec.prompt_tokens, batch_sizes.new_tokens(spec), 0.0)
    for batch in batches:
        run(Cell([asked] * batch, batch, max(spec.max_num_batched_tokens, batch)))
    return engine.calibrated()


def _batches(most: int) -> list[int]:
    doubled = {2**i for i in range(most.bit_length())}
    return sorted(batch for batch in {*range(1, _EVERY_BATCH + 1), *doubled, most} if batch <= most)

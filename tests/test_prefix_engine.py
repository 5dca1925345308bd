"""The engine with a prefix cache: the tokens are those without it, whatever it holds, evicts and restores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.engine import (
    Engine,
    KnownCosts,
    Limits,
    MeasuredCosts,
    PriorityOrder,
    Recompute,
    Request,
    Swap,
    limits_of,
)
from quantlab.engine.prefix_cache import BlockStore, PrefixCache, block_key
from quantlab.engine.prefix_cache.restoring import RestoreCosts, worth_restoring
from quantlab.runtime.backend import Backend, Batch, Capacity
from quantlab.runtime.step_model import StepModel
from tests.engine_cases import orders, preemptions, workloads
from tests.prefix_cases import BLOCK, backend, check

BEGINNING = np.arange(30, dtype=np.int32)


def alone(request: Request) -> list[int]:
    """The tokens that the request gives with nothing beside it."""
    on = backend(1, n_ctx=96)
    return Engine(on, limits_of(on), clock=on.clock).run([request])[0].tokens


def sharing(requests: list[Request], cuts: list[int]) -> list[Request]:
    """The same requests, each behind the first tokens of one beginning."""
    return [
        msgspec.structs.replace(r, prompt=np.concatenate([BEGINNING[: cuts[i % len(cuts)]], r.prompt[:20]]))
        for i, r in enumerate(requests)
    ]


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=120)
def test_every_request_has_the_tokens_that_it_has_alone(data: st.DataObject) -> None:
    requests = sharing(data.draw(workloads()), data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4)))
    on = backend(data.draw(st.integers(2, 6)), n_ctx=96, swap_token_s=1e-4)
    budget = data.draw(st.integers(0, 20)) * BLOCK
    cache = PrefixCache(
        on,
        budget_tokens=budget,
        block_tokens=BLOCK,
        ram_bytes=data.draw(st.sampled_from([0, 500, 10**6])),
        clock=on.clock,
    )
    seqs = data.draw(st.integers(1, on.describe().capacity.n_seq - 1))
    need = max(len(r.prompt) + r.max_new_tokens - 1 for r in requests)
    room = on.describe().capacity.n_seq * 96 - budget
    limits = Limits(seqs, data.draw(st.integers(seqs, 64)), min(room, data.draw(st.integers(need, need + 128))), 96)
    engine = Engine(
        on, limits, clock=on.clock, order=data.draw(orders), preemption=data.draw(preemptions), prefix=cache
    )
    for _ in range(2):
        for request, record in zip(requests, engine.run(requests), strict=True):
            assert record.tokens == alone(request)
            assert record.cached_tokens < len(request.prompt) + record.new_tokens
        assert not cache._leases
        check(cache, on)


def test_later_requests_share_what_earlier_ones_computed() -> None:
    on = backend(4, n_ctx=96)
    cache = PrefixCache(on, budget_tokens=40, block_tokens=BLOCK)
    engine = Engine(on, limits_of(on, prefix_tokens=40), clock=on.clock, prefix=cache)
    ends = ([1, 2, 3], [4, 5], [6], [7, 8])
    requests = [Request(i, np.concatenate([BEGINNING, end]), 4, float(i)) for i, end in enumerate(ends)]
    records = engine.run(requests)
    assert [record.cached_tokens for record in records] == [0, 28, 28, 28]
    # The time of the prefill is that of what is left.
    steps = [step.shape.prefill_tokens + step.shape.decode_seqs for step in engine.steps if step.shape.prefill_tokens]
    assert steps == [33, 4, 3, 4]
    assert records[1].ttft_s is not None
    assert records[0].ttft_s is not None
    assert records[1].ttft_s < records[0].ttft_s


def test_a_running_prompt_is_shared_before_it_ends_and_salts_keep_apart() -> None:
    on = backend(4, n_ctx=96)
    cache = PrefixCache(on, budget_tokens=160, block_tokens=BLOCK)
    engine = Engine(on, limits_of(on, prefix_tokens=160), clock=on.clock, prefix=cache)
    requests = [Request(i, BEGINNING, 40, 0.1 * i, cache_salt=salt) for i, salt in enumerate(["", "", "x", "x"])]
    records = engine.run(requests)
    # The last token of a prompt that is held as a whole is computed.
    assert [record.cached_tokens for record in records] == [0, 28, 0, 28]
    assert [r.cached_tokens for r in engine.run([msgspec.structs.replace(requests[0], prompt=BEGINNING[:28])])] == [27]


def test_a_sequence_that_was_swapped_out_stays_with_its_salt() -> None:
    on = backend(4, n_ctx=96)
    cache = PrefixCache(on, budget_tokens=160, block_tokens=BLOCK)
    engine = Engine(
        on, Limits(1, 64, 96, 96), clock=on.clock, order=PriorityOrder(60.0), preemption=Swap(), prefix=cache
    )
    secret = Request(0, BEGINNING, 40, cache_salt="a", priority="batch")
    records = engine.run([secret, Request(1, np.full(9, 7, np.int32), 2, 0.1)])
    assert records[0].swapped == 1
    others = [Request(i, BEGINNING, 1, cache_salt=salt) for i, salt in enumerate(["", "b", "a"])]
    assert [record.cached_tokens for record in engine.run(others)] == [0, 0, 28]


def test_each_block_of_a_request_is_hashed_once() -> None:
    hashed: list[bytes] = []

    def counting(parent: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return block_key(parent, tokens)

    on = backend(4, n_ctx=96)
    cache = PrefixCache(on, budget_tokens=160, block_tokens=BLOCK, hash_block=counting)
    engine = Engine(on, limits_of(on, prefix_tokens=160), clock=on.clock, prefix=cache)
    for _ in range(2):
        engine.run([Request(0, BEGINNING, 15), Request(1, np.concatenate([BEGINNING, [1, 2, 3]]), 15)])
    # The last token of an answer is in no KV.
    assert len(hashed) == 2 * ((30 + 14) // BLOCK + (33 + 14) // BLOCK)


def test_a_conversation_goes_on_from_its_own_answer() -> None:
    on = backend(3, n_ctx=96)
    cache = PrefixCache(on, budget_tokens=80, block_tokens=BLOCK)
    engine = Engine(on, limits_of(on, prefix_tokens=80), clock=on.clock, prefix=cache)
    (first,) = engine.run([Request(0, BEGINNING, 15)])
    history = np.concatenate([BEGINNING, first.tokens, [1, 2, 3]])
    (second,) = engine.run([Request(0, history, 4)])
    # The last token of an answer is handed out, not fed back: 30 + 14 are held, in blocks of 4.
    assert second.cached_tokens == 44
    assert second.tokens == alone(Request(0, history, 4))


def test_a_step_that_fails_leaves_nothing_in_the_cache() -> None:
    on = backend(3, n_ctx=96)
    cache = PrefixCache(on, budget_tokens=80, block_tokens=BLOCK)
    engine = Engine(on, limits_of(on, prefix_tokens=80), clock=on.clock, prefix=cache)

    def fails(batch: Batch) -> Any:
        raise QuantlabError("the device is gone")

    whole, on.forward = on.forward, fails  # type: ignore[method-assign]
    (record,) = engine.run([Request(0, BEGINNING, 4)])
    assert record.status == "failed"
    on.forward = whole  # type: ignore[method-assign]
    (record,) = engine.run([Request(0, BEGINNING, 4)])
    assert (record.status, record.cached_tokens) == ("finished", 0)
    check(cache, on)


def test_limits_must_leave_room_for_the_cache() -> None:
    on = backend(4, n_ctx=96)
    cache = PrefixCache(on, budget_tokens=80, block_tokens=BLOCK)
    with pytest.raises(UsageError, match="4 sequences with 384"):
        Engine(on, limits_of(on), clock=on.clock, prefix=cache)
    with pytest.raises(UsageError, match="without sharing"):
        PrefixCache(_unshared(), budget_tokens=80)
    for sizes in (
        {"budget_tokens": -1},
        {"budget_tokens": 1, "block_tokens": 0},
        {"budget_tokens": 1, "ram_bytes": -1},
    ):
        with pytest.raises(UsageError, match="a prefix cache of"):
            PrefixCache(on, **sizes)


def _unshared() -> Backend:
    from quantlab.runtime.clock import VirtualClock
    from quantlab.runtime.simulated import SimulatedBackend

    return SimulatedBackend(Capacity(n_seq=2, shared=False), StepModel(1.0), VirtualClock())


# restore or recompute


def observed(**token_s: float) -> RestoreCosts:
    found = RestoreCosts()
    for tier, seconds in token_s.items():
        for _ in range(5):
            found.observe(tier, 16, 16 * seconds)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("ram_s", "disk_s", "worth"),
    [
        (0.5e-3, 0.5e-3, 4),
        (2e-3, 2e-3, 0),
        # Disk takes longer than computing, RAM does not: only what lies in RAM.
        (0.5e-3, 2e-3, 2),
        # What RAM saves is not spent on a disk.
        (1e-6, 1.1e-3, 2),
    ],
)
def test_only_what_returns_faster_than_it_is_computed_is_restored(ram_s: float, disk_s: float, worth: int) -> None:
    costs = KnownCosts(StepModel(0.01, 1e-3))
    tiers: list[Any] = ["ram", "ram", "disk", "disk"]
    seen = observed(ram=ram_s, disk=disk_s)
    assert worth_restoring(tiers, seen, costs, start=0, block_tokens=16) == worth


def test_a_block_of_a_slow_tier_is_restored_where_those_behind_it_make_up_for_it() -> None:
    costs = KnownCosts(StepModel(0.01, 1e-3))
    seen = observed(ram=1e-6, disk=1.2e-3)
    assert worth_restoring(["disk", "ram"], seen, costs, start=0, block_tokens=16) == 2
    # Attention makes later tokens dearer to compute.
    dear = KnownCosts(StepModel(0.01, 1e-3, 1e-6))
    assert worth_restoring(["disk"], seen, dear, start=0, block_tokens=16) == 0
    assert worth_restoring(["disk"], seen, dear, start=1000, block_tokens=16) == 1


def test_nothing_known_is_tried() -> None:
    assert worth_restoring(["ram", "disk"], RestoreCosts(), KnownCosts(StepModel(1e-9)), start=0, block_tokens=16) == 2
    assert worth_restoring(["ram"], observed(ram=9.0), MeasuredCosts(), start=0, block_tokens=16) == 1
    assert worth_restoring(["ram"], observed(ram=9.0), None, start=0, block_tokens=16) == 1


def test_a_tier_that_is_slower_than_computing_is_left_alone() -> None:
    on = backend(3, n_ctx=96, swap_token_s=1.0)
    costs = KnownCosts(StepModel(0.01, 1e-3))
    cache = PrefixCache(on, budget_tokens=28, block_tokens=BLOCK, ram_bytes=10**6, costs=costs, clock=on.clock)
    engine = Engine(on, limits_of(on, prefix_tokens=28), clock=on.clock, prefix=cache)
    prompts = [np.full(30, word, np.int32) for word in (1, 2)]
    requests = [Request(i, prompts[i % 2], 2, 1000.0 * i) for i in range(8)]
    assert [record.cached_tokens for record in engine.run(requests)] == [0, 0, 28, 0, 0, 0, 0, 0]
    assert cache.counters()["not_worth_restoring"] == 5 * 7


# real models

N_CTX, N_SEQ, N_BATCH, NEW = 128, 6, 64, 12
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. " * 3
ENDS = ["One day", "The dog", "Lily saw a big", "One day", "Her mom said that", "The dog was very"]


@pytest.fixture(scope="module", params=["llamacpp", "torch"])
def model(request: pytest.FixtureRequest, stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    capacity = Capacity(N_CTX, N_SEQ, N_BATCH)
    if request.param == "llamacpp":
        pytest.importorskip("llama_cpp")
        from quantlab.quantize.convert import convert
        from quantlab.runtime.llamacpp import LlamaCppBackend

        path = tmp_path_factory.mktemp("model") / "stories.gguf"
        convert(stories, path, outtype="F32")
        opened: Backend = LlamaCppBackend(path, capacity, device="cpu", threads=1)
    else:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        from quantlab.runtime.torch.backend import TorchBackend

        opened = TorchBackend(stories, capacity, device="cpu", dtype="float32", threads=1)
    yield opened
    opened.close()


def texts(model: Backend) -> list[Request]:
    head = model.encode(STORY)[:50]
    return [Request(i, np.concatenate([head, model.encode(end)]), NEW, 0.002 * i) for i, end in enumerate(ENDS)]


@pytest.mark.parametrize("budget", [0, 32, 48, 512])
@pytest.mark.parametrize("preemption", [Swap(), Recompute()], ids=["swap", "recompute"])
def test_the_greedy_tokens_are_those_without_a_cache(
    model: Backend, budget: int, preemption: Any, tmp_path: Path
) -> None:
    model.reset()
    requests = texts(model)
    plain = Engine(model, limits_of(model, max_num_seqs=3), preemption=preemption).run(requests)
    store = BlockStore(tmp_path, model.identity())
    # Room for two sequences, so that some are preempted.
    limits = Limits(3, N_BATCH, 150, N_CTX)
    for _ in range(2):
        model.reset()
        cache = PrefixCache(model, budget_tokens=budget, ram_bytes=60_000, store=store)
        engine = Engine(model, limits, order=PriorityOrder(1.0), preemption=preemption, prefix=cache)
        for _ in range(2):
            records = engine.run(requests)
            assert [record.tokens for record in records] == [record.tokens for record in plain]
        cache.persist()
        if budget > 100:
            assert min(record.cached_tokens for record in records) >= 48
    assert not cache.notices()
    if budget > 100:
        assert cache.counters()["hit_disk_tokens"] >= 48


def test_shared_restored_and_computed_blocks_give_the_same_logits(model: Backend, tmp_path: Path) -> None:
    """Exactly: the blocks were computed in the same steps."""
    model.reset()
    tokens = np.concatenate([model.encode(STORY)[:48], model.encode(ENDS[0])])
    rest = Batch.of(0, tokens[48:], 48, logits="all")
    model.forward(Batch.of(0, tokens[:48], 0, logits="none"))
    expected = model.forward(rest).copy()
    model.reset()
    for _ in range(2):
        cache = PrefixCache(model, budget_tokens=64, store=BlockStore(tmp_path, model.identity()))
        for _ in range(2):
            slot, held = cache.begin(cache.prompt(tokens))
            if not held:
                model.forward(Batch.of(slot, tokens[:48], 0, logits="none"))
            rows = model.forward(Batch.of(slot, tokens[48:], 48, logits="all"))
            np.testing.assert_array_equal(rows, expected)
            cache.end(slot, len(tokens))
        cache.persist()
        model.reset()
    assert cache.counters()["hit_disk_tokens"] == 48

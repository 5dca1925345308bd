"""An endpoint that speculates: the method's numbers from its counters, its answers, or its gauge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.result import Result
from quantlab.lab.execute import Lab
from quantlab.lab.speculative import found, speculative_step
from quantlab.report.speculative import tabulate_speculative
from quantlab.runtime.server_kind import counters_in, gauge_in
from tests.fake_server import MODELS, FakeServer, Reply, good


def owned_by(owner: str) -> dict[str, Any]:
    return {"object": "list", "data": [{**MODELS["data"][0], "owned_by": owner}]}


def vllm_page(drafts: int, tokens: int, at: tuple[int, ...]) -> str:
    lines = [
        f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}.0',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {tokens}.0',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {sum(at)}.0',
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9',
    ]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{engine="0",model_name="m",position="{i}"}} {n}.0' for i, n in enumerate(at)]
    return "\n".join(lines) + "\n"


def measured(server: FakeServer, prompts: Path, **options: Any) -> list[Result]:
    prompts.write_text('{"category": "code", "turns": ["a"]}\n{"category": "code", "turns": ["b"]}\n')
    options = {"prompts": str(prompts), "new_tokens": 9} | options
    return Lab(None).execute(speculative_step(*found(Lab(None), server.url, options), options))


def test_vllms_counters_are_read_since_the_start_of_the_run(tmp_path: Path) -> None:
    """Before it 10 drafts were counted; during it 40 of 4 tokens, of which 30, 20, 16, 12 stood at their positions."""
    about = {"/v1/models": owned_by("vllm"), "/metrics": vllm_page(10, 40, (5, 4, 3, 2)), "/version": {"version": "1"}}

    async def drafts(body: dict[str, Any], reply: Reply) -> None:
        await good(body, reply)
        server.about["/metrics"] = vllm_page(50, 200, (35, 24, 19, 14))

    with FakeServer(drafts, about) as server:
        (row,) = measured(server, tmp_path / "p", batch="2")
        asked = [body for body in server.bodies() if body["max_tokens"] == 9]
    assert sorted(body["messages"][0]["content"] for body in asked) == ["a", "b"]
    d, m = row.details, {name: found.samples for name, found in row.measurements.items()}
    assert (d["speculates"], d["drafts"], d["draft_tokens"], d["accepted"]) == (True, 40, 160, 78)
    # Tested: each draft's first token, then 30 second ones, 20 third ones, 16 fourth ones.
    assert m["acceptance_rate"] == pytest.approx([78 / 106])
    assert m["acceptance_rate_per_position"] == pytest.approx([30 / 40, 20 / 30, 16 / 20, 12 / 16])
    assert m["mean_tokens_per_verify"] == pytest.approx([1 + 78 / 40])
    a = 78 / 106
    assert d["expected_tokens_per_verify"] == pytest.approx((1 - a**5) / (1 - a))
    assert d["accepted_of_drafted"] == pytest.approx(78 / 160)
    assert d["draft_length"] == 4
    assert [w.code for w in row.warnings] == ["no-plain-run"]
    (table,) = tabulate_speculative([row])
    assert "4.00 tokens" in [str(entry) for entry in table.rows[0]]


def test_a_server_that_accepts_nothing_has_rates_of_zero(tmp_path: Path) -> None:
    about = {"/v1/models": owned_by("vllm"), "/metrics": vllm_page(0, 0, (0, 0)), "/version": {"version": "1"}}

    async def drafts(body: dict[str, Any], reply: Reply) -> None:
        await good(body, reply)
        server.about["/metrics"] = vllm_page(10, 20, (0, 0))

    with FakeServer(drafts, about) as server:
        (row,) = measured(server, tmp_path / "p")
    assert (row.details["speculates"], row.details["accepted_of_drafted"]) == (True, 0.0)
    assert row.measurements["acceptance_rate"].samples == [0.0]
    assert row.measurements["mean_tokens_per_verify"].samples == [1.0]


def test_requests_that_fail_are_told(tmp_path: Path) -> None:
    async def fails_once(body: dict[str, Any], reply: Reply) -> None:
        if body.get("messages", [{}])[0].get("content") == "b":
            await reply.whole(500, {"error": {"message": "out of memory"}})
        else:
            await good(body, reply)

    with FakeServer(fails_once) as server:
        (row,) = measured(server, tmp_path / "p", batch="2")
    assert (row.details["requests"], row.warnings[0].code) == (1, "unanswered")
    assert "1 of 2 requests" in row.warnings[0].message


def test_llama_server_tells_with_each_answer(tmp_path: Path) -> None:
    """9 tokens: the first is the prompt's, 5 more are accepted ones; so 3 verifies handed out 8 tokens."""

    async def drafts(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        for i in range(9):
            timings = {"predicted_n": i + 1, "prompt_n": 1, "cache_n": 0, "draft_n": 12, "draft_n_accepted": 5}
            await reply.text(" w", "length" if i == 8 else None, timings=timings)
        await reply.event("[DONE]")
        await reply.end()

    with FakeServer(drafts, {"/v1/models": owned_by("llamacpp"), "/props": {}}) as server:
        (row,) = measured(server, tmp_path / "p")
    assert (row.details["drafts"], row.details["draft_tokens"], row.details["accepted"]) == (6, 24, 10)
    assert row.measurements["mean_tokens_per_verify"].samples == pytest.approx([8 / 3])
    assert "acceptance_rate" not in row.measurements


def test_sglang_has_a_gauge_alone(tmp_path: Path) -> None:
    page = 'sglang:prompt_tokens_total 1\nsglang:spec_accept_length{tp_rank="0"} 2.5\n'
    with FakeServer(good, {"/v1/models": owned_by("sglang"), "/metrics": page, "/server_info": {}}) as server:
        (row,) = measured(server, tmp_path / "p")
    assert row.measurements["mean_tokens_per_verify"].samples == [2.5]
    assert "gauge" in [w.code for w in row.warnings]


@pytest.mark.parametrize(
    ("owner", "page", "code"),
    [
        ("vllm", "vllm:prompt_tokens_total 1\n", "no-draft-counters"),
        ("vllm", vllm_page(0, 0, (0, 0)), "not-speculating"),
        ("me", None, "no-draft-counters"),
    ],
)
def test_a_server_that_does_not_speculate_or_does_not_tell(
    tmp_path: Path, owner: str, page: str | None, code: str
) -> None:
    about = {"/v1/models": owned_by(owner), "/version": {"version": "1"}, **({"/metrics": page} if page else {})}
    with FakeServer(good, about) as server:
        (row,) = measured(server, tmp_path / "p")
    assert [w.code for w in row.warnings] == [code]
    assert not {"acceptance_rate", "mean_tokens_per_verify"} & row.measurements.keys()
    assert "tpot" in row.measurements


def test_a_server_without_chats_is_sent_texts_and_one_that_fails_is_an_error(tmp_path: Path) -> None:
    async def texts(body: dict[str, Any], reply: Reply) -> None:
        if "messages" in body:
            await reply.whole(400, {"error": {"message": "no chat template"}})
        else:
            await good(body, reply)

    with FakeServer(texts) as server:
        (row,) = measured(server, tmp_path / "p")
        assert row.details["requests"] == 2

    async def fails(body: dict[str, Any], reply: Reply) -> None:
        await reply.whole(500, {"error": {"message": "out of memory"}})

    with FakeServer(fails) as server, pytest.raises(QuantlabError, match=r"answers no prompt: .*out of memory"):
        measured(server, tmp_path / "p")


@pytest.mark.parametrize("option", [{"k": "2"}, {"temperature": 1.0}, {"adaptive": True}, {"prompt_lookup_max": 2}])
def test_options_that_a_server_does_not_heed_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    with FakeServer() as server, pytest.raises(UsageError, match="does nothing for an endpoint"):
        measured(server, tmp_path / "p", **option)


def test_counters_by_position_and_gauges_of_a_page() -> None:
    page = vllm_page(3, 9, (2, 1)) + 'g{a="1"} 1.5\ng{a="2"} 2.5\n'
    wanted = {"x_at": ("vllm:spec_decode_num_accepted_tokens_per_pos_total",), "none_at": ("nothing",)}
    assert counters_in(page, wanted) == {"x_at_0": 2, "x_at_1": 1}
    assert (gauge_in(page, "g"), gauge_in(page, "h")) == (2.5, None)

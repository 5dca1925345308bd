"""Logs that were written before the rules of lint were read: 20 with one planted cause each, and 10 clean ones.

Every log is drawn from a seed, with the shapes that applications write: chat requests, plain prompts, tools, retrieval.
At their first run 12 of the 20 causes had their name, 5 were found as another text that varies, 3 had a wrong name, and
nothing was found in the clean ones.
"""

from __future__ import annotations

import datetime
import json
import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any

POLICY = """You are the support assistant of Northwind Outdoor, a shop for tents, boots and climbing gear.
Answer only from the policy below and never promise a refund before a colleague has looked at the case.
Returns: unworn goods may come back within 30 days with the label attached; sale goods are exchanged, not refunded.
Shipping: parcels under two kilograms go by letter post, heavier ones by courier, and both are insured to 500 euros.
Warranty: seams and zips for five years, soles for two; fire, bleach and dogs are not covered by any of our warranties.
Tone: short sentences, no exclamation marks, and always one concrete next step that the customer can take right now.
If the customer is angry, acknowledge it once, then move on to what can be done about the order in question.
Escalate to a human when the customer asks for one, mentions a lawyer, or writes in capitals three times in a row.
"""
CODE = """You are a careful reviewer of Python changes in a large monorepo with strict typing and no global state.
Comment only on correctness, security and readability; never on style that the formatter would mend by itself.
For each finding give the file, the line, what can go wrong, and the smallest change that would make it right.
Prefer one good comment over five weak ones, and say nothing when the change is fine as it stands today.
Treat migrations as dangerous: ask for a rollback plan, for the lock that they take and for how long they hold it.
Never suggest a new dependency unless the standard library would need more than fifty lines for the same job.
"""
ZH = """你是一家在线书店的客服助手，只能根据下面的规则回答顾客的问题，不要编造任何没有写明的承诺。
退货：未拆封的图书在签收之后三十天之内可以退货，电子书一经下载不予退款，促销商品只能换货。
运费：订单满九十九元包邮，不满的收取八元运费，偏远地区另外加收十二元，并且需要提前告知顾客。
语气：简短、礼貌、不使用感叹号，每次回答都要给出一个顾客现在就可以采取的具体步骤。
"""
DOCUMENTS = [
    f"{title}. {body}"
    for title, body in (
        (
            "Pitching on sand",
            "Bury the pegs sideways and fill the hole; a bag of sand holds better than any steel peg.",
        ),
        ("Washing down", "Use little soap, rinse twice, and dry it slowly with two clean tennis balls in the drum."),
        ("Boots that rub", "Wear them at home for a week, lace the ankle loosely and put tape on the heel beforehand."),
        (
            "Ropes and age",
            "A rope that was never used is good for ten years; after a hard fall it is good for nothing.",
        ),
        ("Stoves in tents", "Never. Carbon monoxide has no smell, and every winter somebody does not wake up again."),
        ("Packing weight", "Heavy things go close to the back at the height of the shoulders, light ones far below."),
    )
]
QUESTIONS = [
    "Where is my parcel?", "Can I return boots that I wore once?", "Which tent stands well in wind?",
    "Does the zip count as a seam?", "Do you ship to Norway, and what does it cost?", "My stove leaks. What now?",
    "How do I wash a down jacket?", "Is the blue rope in stock?", "I was charged twice, please look into it.",
    "How long may I keep a climbing rope?", "Can you change the address of an order?", "What size of pack for a week?",
]  # fmt: skip
NAMES = [
    "Priya Raman", "Jonas Weber", "Chinedu Okafor", "Marta Kowalska", "Liam O'Connor", "Yuki Tanaka", "Ana Sousa",
    "Tom Becker", "Fatima Zahra", "Elif Demir", "Piotr Nowak", "Grace Kim",
]  # fmt: skip
TOOLS = [
    ("get_order", "Look an order up by its number", {"order_id": "string"}),
    ("search_articles", "Search the help centre for articles", {"query": "string", "limit": "integer"}),
    ("create_ticket", "Open a ticket for a colleague", {"subject": "string", "body": "string", "priority": "string"}),
    ("get_weather", "Weather at a place over the next days", {"place": "string", "days": "integer"}),
    ("check_stock", "How many pieces of an article are in stock", {"sku": "string"}),
]
WEEKDAYS = ("Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag")
MONTHS = ("Januar", "Februar", "März", "April", "Mai", "Juni")
N_REQUESTS = 12


def clock(rng: random.Random) -> Iterator[datetime.datetime]:
    """Moments in the order of a log."""
    at = datetime.datetime(2026, 1, 5, 8, 14, 22)
    while True:
        at += datetime.timedelta(seconds=rng.randrange(40, 90_000))
        yield at


def chat(system: str, question: str, **more: Any) -> str:
    """A line of a log of chat requests."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return json.dumps({"model": "gpt-4o-mini", "messages": messages, **more}, ensure_ascii=False)


def prompt(text: str) -> str:
    """A line of a log of completions."""
    return json.dumps({"prompt": text}, ensure_ascii=False)


def tool(name: str, about: str, parameters: dict[str, str], order: random.Random | None = None) -> dict[str, Any]:
    """A tool as OpenAI takes it; the keys of its objects in an `order` of their own."""

    def shuffled(of: dict[str, Any]) -> dict[str, Any]:
        return dict(order.sample(sorted(of.items()), len(of))) if order else of

    schema = {"type": "object", "properties": shuffled({n: {"type": t} for n, t in parameters.items()})}
    function = {"name": name, "description": about, "parameters": shuffled(schema)}
    return {"type": "function", "function": shuffled(function)}


def _each(make: Callable[[random.Random, int, datetime.datetime, str], str], seed: int) -> list[str]:
    rng = random.Random(seed)
    times = clock(rng)
    return [make(rng, i, next(times), QUESTIONS[i % len(QUESTIONS)]) for i in range(N_REQUESTS)]


def _hex(rng: random.Random, n: int) -> str:
    return f"{rng.getrandbits(4 * n):0{n}x}"


def _crockford(rng: random.Random, n: int) -> str:
    return "".join(rng.choice("0123456789ABCDEFGHJKMNPQRSTVWXYZ") for _ in range(n))


def http_date(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(f"Date: {at:%a, %d %b %Y %H:%M:%S} GMT\n{POLICY}", q)


def epoch_milliseconds(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return prompt(f"session_start={int(at.timestamp() * 1000)}\n{CODE}\nChange {i}: {q}")


def german_date(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    day = f"{WEEKDAYS[at.weekday()]}, {at.day}. {MONTHS[at.month - 1]} {at.year}, {at:%H:%M} Uhr"
    return chat(f"Heute ist {day}.\n{POLICY}", q)


def chinese_date(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(
        f"现在是{at.year}年{at.month}月{at.day}日{at.hour}时{at.minute}分。\n{ZH}", f"第{i}个问题：书什么时候到？"
    )


def request_uuid(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return prompt(f"Request-ID: {uuid.UUID(int=rng.getrandbits(128), version=4)}\n\n{POLICY}\nCustomer: {q}\nAgent:")


def prefixed_id(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(f"[req_{_crockford(rng, 26)}] {POLICY}", q)


def trace_parent(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(f"traceparent: 00-{_hex(rng, 32)}-{_hex(rng, 16)}-01\n{CODE}", q)


def user_name(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    name = NAMES[i % len(NAMES)]
    return chat(f"You are talking to {name}, a member since {rng.randrange(2009, 2026)}.\n{POLICY}", q)


def chinese_user_name(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    name = rng.choice("王李张刘陈杨赵黄周吴") + rng.choice("伟芳娜敏静强磊洋艳勇")
    return chat(f"当前用户：{name}\n{ZH}", f"第{i}个问题：怎么退货？")


def session_data(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    cart = {"items": rng.randrange(9), "total_eur": round(rng.uniform(5, 400), 2), "coupon": rng.random() < 0.5}
    return chat(f"Cart of this session: {json.dumps(cart)}\n{POLICY}", q)


def address_and_locale(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    ip = f"203.0.{rng.randrange(256)}.{rng.randrange(1, 255)}"
    return chat(f"Client {ip}, locale {rng.choice(['de-DE', 'en-GB', 'fr-FR'])}\n{POLICY}", q)


def turn_counter(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return prompt(f"### Call {1041 + i}\n{CODE}\nDiff under review: {q}")


def wall_clock(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(f"{POLICY.splitlines()[0]}\nIt is {at:%-I:%M %p} in Berlin.\n{POLICY}", q)


def tools_reordered(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(POLICY, q, tools=[tool(*one) for one in rng.sample(TOOLS, len(TOOLS))])


def tools_keys_reordered(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(POLICY, q, tools=[tool(*one, rng) for one in TOOLS])


def context_keys_reordered(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    shop = {"name": "Northwind", "currency": "EUR", "country": "DE", "hours": "9-17", "returns_days": 30, "chat": True}
    return chat(f"Shop: {json.dumps(dict(rng.sample(sorted(shop.items()), len(shop))))}\n{POLICY}", q)


def documents_reordered(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    found = "\n\n".join(f"[{n}] {text}" for n, text in enumerate(rng.sample(DOCUMENTS, 5), 1))
    return prompt(f"Answer from the passages.\n\n{found}\n\n{POLICY}\nQuestion: {q}\nAnswer:")


def examples_shuffled(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    turns: list[dict[str, str]] = [{"role": "system", "content": "Answer the customer in one sentence."}]
    for n in rng.sample(range(6), 6):
        turns += [{"role": "user", "content": QUESTIONS[n]}, {"role": "assistant", "content": DOCUMENTS[n]}]
    return json.dumps({"messages": [*turns, {"role": "user", "content": f"{q} ({i})"}]})


def template_version(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(f"<!-- support-prompt v2.{rng.choice([3, 4])} -->\n{POLICY}", q)


def line_ends(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(POLICY.replace("\n", "\r\n") if rng.random() < 0.5 else POLICY, q)


Make = Callable[[random.Random, int, datetime.datetime, str], str]
# The cause that is planted, and who writes a request of the log.
PLANTED: dict[str, tuple[str, Make]] = {
    make.__name__: (cause, make)
    for cause, makes in (
        ("timestamp", (http_date, epoch_milliseconds, german_date, chinese_date, wall_clock)),
        ("id", (request_uuid, prefixed_id, trace_parent, address_and_locale)),
        ("user name", (user_name, chinese_user_name)),
        ("number", (session_data, turn_counter)),
        ("tool order", (tools_reordered,)),
        ("tool keys", (tools_keys_reordered,)),
        ("json keys", (context_keys_reordered,)),
        ("order", (documents_reordered,)),
        ("turn order", (examples_shuffled,)),
        ("template", (template_version,)),
        ("white space", (line_ends,)),
    )
    for make in makes
}


def clean_chat(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(POLICY, q)


def clean_time_last(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(POLICY, f"{q}\n\n(sent by {NAMES[i % len(NAMES)]} at {at:%Y-%m-%d %H:%M})")


def clean_prompt(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return prompt(f"{CODE}\nChange {_hex(rng, 12)}: {q}\nReview:")


def clean_tools(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(POLICY, q, tools=[tool(*one) for one in TOOLS], user=f"user-{rng.randrange(10**6)}")


def clean_retrieval(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    words = rng.sample(POLICY.split() + CODE.split(), 60)
    return chat(POLICY, f"Passages:\n{' '.join(words)}\n\nQuestion: {q}")


def clean_chinese(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(ZH, f"订单{rng.randrange(10**8)}什么时候到？我叫{rng.choice('王李张刘陈')}伟。")


def clean_two_applications(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(rng.choice([POLICY, CODE]), q)


def clean_ids_in_questions(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return chat(POLICY, f"{uuid.UUID(int=rng.getrandbits(128))} {at:%d.%m.%Y}: {q}")


def clean_nothing_shared(rng: random.Random, i: int, at: datetime.datetime, q: str) -> str:
    return prompt(" ".join(rng.sample(POLICY.split() + CODE.split() + " ".join(DOCUMENTS).split(), 40)))


def clean_conversations(seed: int) -> list[str]:
    """Conversations that grow by a turn, mixed."""
    rng, histories, lines = random.Random(seed), list[list[dict[str, str]]](), list[str]()
    for i in range(3):
        histories.append([{"role": "system", "content": POLICY}, {"role": "user", "content": QUESTIONS[i]}])
    for _ in range(4 * 3):
        history = rng.choice(histories)
        lines.append(json.dumps({"messages": history}))
        history += [
            {"role": "assistant", "content": rng.choice(DOCUMENTS)},
            {"role": "user", "content": f"{NAMES[len(history) % 12]} asks: {rng.choice(QUESTIONS)}"},
        ]
    return lines


CLEAN: dict[str, Make | None] = {
    "clean_conversations": None,
    **{
        make.__name__: make
        for make in (
            clean_chat, clean_time_last, clean_prompt, clean_tools, clean_retrieval, clean_chinese,
            clean_two_applications, clean_ids_in_questions, clean_nothing_shared,
        )
    },
}  # fmt: skip


def log(name: str, seed: int = 0) -> list[str]:
    """The lines of a log, by its name in `PLANTED` or `CLEAN`."""
    make = PLANTED[name][1] if name in PLANTED else CLEAN[name]
    return clean_conversations(seed) if make is None else _each(make, seed)

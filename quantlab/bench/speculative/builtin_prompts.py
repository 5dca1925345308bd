"""Prompts of our own in five categories, for a machine without a file of them. Spec-Bench has more (`--prompts`)."""

from __future__ import annotations

from quantlab.core.corpus import load_text

_ASKED = {
    "code": (
        "Write a Python function that returns the n most common words of a text file, ignoring case.",
        "Write a Python class for a bank account with deposit, withdraw and a list of past transactions.",
        "Write a SQL query that lists customers with more than three orders in the last month.",
        "Write a JavaScript function that debounces another function, and explain how to use it.",
    ),
    "chat": (
        "I have two free days in Lisbon in October. What should I do?",
        "Explain to a ten year old why the sky is blue.",
        "How do I tell my neighbour politely that his dog barks at night?",
        "What are the main differences between a cello and a viola?",
    ),
    "maths": (
        "A shop sells pens at 3 for 2 euros. Anna buys 12 pens and pays with a 20 euro note. How much change is there?",
        "A train leaves at 9:40 and arrives at 13:15. It stops for 25 minutes in all. How long does it move?",
        "Solve 3x + 7 = 2(x + 9) for x. Show each step.",
        "A tank holds 240 litres. It is filled at 8 litres a minute and leaks 2 litres a minute. When is it full?",
    ),
}
# How a paragraph of the built-in evaluation text begins, and what is asked about it: heads are not trained on it.
_PASSAGES = {
    "Because the planet has almost no atmosphere": "How hot and how cold does the surface become?",
    "Lichens absorb water and nutrients": "Why do lichens suffer from polluted air?",
    "His starting point was a code": "What did the code of twelve dots serve for?",
    "European paper was made from": "What was paper made from before wood, and why did that change?",
}


def builtin_prompts() -> list[tuple[str, str]]:
    """(category, prompt): code, chat, maths, summarization, retrieval."""
    text = load_text("builtin_eval", "evaluation").raw.split("\n\n")
    passages = [next(p for p in text if p.startswith(beginning)) for beginning in _PASSAGES]
    asked = [(category, question) for category, questions in _ASKED.items() for question in questions]
    asked += [("summarization", f"Summarize the text in two sentences.\n\n{passage}") for passage in passages]
    for passage, question in zip(passages, _PASSAGES.values(), strict=True):
        asked.append(("retrieval", f"{passage}\n\nQuote the sentences that answer this: {question}"))
    return asked

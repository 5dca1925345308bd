"""Whether a model is meant for Chinese, and whether it is calibrated on Chinese."""

from __future__ import annotations

from collections.abc import Sequence

from quantlab.core.corpus import Corpus
from quantlab.core.result import Notice

CHINESE_SET = "builtin_zh"
_CHINESE_NAMES = ("qwen", "yi-", "glm", "baichuan", "internlm", "deepseek", "minicpm", "chinese", "-zh")
# A vocabulary or a text with at least this share of Chinese tokens or characters counts as Chinese.
_CHINESE_SHARE = 0.05


def speaks_chinese(name: str, vocabulary: Sequence[str]) -> bool:
    """Whether a model is likely meant for Chinese: by its name, or 5% of its tokens hold Chinese characters."""
    if any(mark in f"{name.lower()}-" for mark in _CHINESE_NAMES):
        return True
    chinese = sum(1 for token in vocabulary if _has_chinese(_readable(token)))
    return bool(vocabulary) and chinese / len(vocabulary) >= _CHINESE_SHARE


def language_notices(name: str, parts: Sequence[tuple[Corpus, float]], *, chinese: bool) -> list[Notice]:
    """A warning where a Chinese model is calibrated on texts without Chinese."""
    if not chinese or any(_chinese_share(corpus.raw) >= _CHINESE_SHARE for corpus, _ in parts):
        return []
    sets = ", ".join(f"`{corpus.name}`" for corpus, _ in parts)
    return [
        Notice(
            "calibration-language",
            f"`{name}` looks like a Chinese model (by its name or vocabulary), but {sets} hold no Chinese",
            f"mix in Chinese text: `--calib {CHINESE_SET}` or `--calib zh_wiki`",
        )
    ]


def _has_chinese(text: str) -> bool:
    return any("一" <= c <= "鿿" for c in text)


def _chinese_share(text: str) -> float:
    return sum(1 for c in text if "一" <= c <= "鿿") / max(1, len(text))


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE vocabularies write for bytes (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


def _readable(token: str) -> str:
    """A vocabulary entry as text: byte-level entries are decoded, others are text already."""
    if all(c in _BYTES for c in token):
        return bytes(_BYTES[c] for c in token).decode("utf-8", "ignore")
    return token

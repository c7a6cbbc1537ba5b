"""Tokens and answers of the simulated model. A token is up to three bytes of UTF-8, so that token ids can be
turned back into the text, and what the model answers is found in the prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PIECE_BYTES = 3
_TWO = 1 << 8
_THREE = _TWO + (1 << 16)
VOCABULARY = _THREE + (1 << 24)

_LEAST_QUESTION = 10  # characters that a continuation is looked for by
_ASKED = re.compile(r"(?:what|which)\s+is\s+(?P<fact>the\s[\w\s-]{4,80}?\s(?:for|of)\s[\w-]+)\s*\?", re.I)
_FILLER = " The river bends twice before it reaches the old mill."


def encode(text: str) -> list[int]:
    """Token ids: one for every three bytes. The same text gives the same ids."""
    data = text.encode("utf-8", errors="replace")
    return [_id_of(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)]


def decode(ids: Iterable[int]) -> str:
    """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(_bytes_of(one) for one in ids).decode("utf-8", errors="replace")


def count(text: str) -> int:
    """Tokens of a text."""
    return -(-len(text.encode("utf-8", errors="replace")) // PIECE_BYTES)


def chat_text(messages: Sequence[object]) -> str:
    """Messages as this model's chat template writes them."""
    parts = []
    for message in messages:
        if isinstance(message, dict):
            parts.append(
                f"<|im_start|>{message.get('role', 'user')}\n{_content(message.get('content'))}<|im_end|>\n"
            )
    return "".join(parts) + "<|im_start|>assistant\n"


def answer_text(prompt: str) -> str:
    """What the model continues a prompt with: the prompt's last line where it stood before, with what
    followed it there; else filler."""
    question = prompt.rstrip().rpartition("\n")[2].strip()
    found = _continuation(prompt, question)
    if not found:
        # the last thing that was asked, in a chat
        for asked in reversed(list(_ASKED.finditer(prompt))):
            fact = asked["fact"]
            found = _continuation(prompt, f"{fact[0].upper()}{fact[1:]} is")
            found = found or _continuation(prompt, f"{fact[0].lower()}{fact[1:]} is")
            break
    return found + _FILLER


def answer_ids(prompt: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of the answer."""
    ids = encode(answer_text(prompt))
    if len(ids) < tokens:
        more = encode(_FILLER * (1 + (tokens - len(ids)) * PIECE_BYTES // len(_FILLER)))
        ids += more
    return ids[:tokens]


def _continuation(prompt: str, question: str) -> str:
    if len(question) < _LEAST_QUESTION:
        return ""
    at = prompt.find(question)
    end = at + len(question)
    if at < 0 or not prompt[end:].strip() or prompt[end:].strip().startswith("?"):
        return ""
    rest = prompt[end : end + 80]
    stop = min((place for mark in (". ", ".\n", "\n") if (place := rest.find(mark)) >= 0), default=len(rest))
    return rest[: stop + 1].rstrip("\n")


def _content(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _id_of(piece: bytes) -> int:
    value = int.from_bytes(piece, "big")
    if len(piece) == PIECE_BYTES:
        return _THREE + value
    return value if len(piece) == 1 else _TWO + value


def _bytes_of(one: int) -> bytes:
    if one >= _THREE:
        return (one - _THREE).to_bytes(PIECE_BYTES, "big") if one < VOCABULARY else b"?"
    if one >= _TWO:
        return (one - _TWO).to_bytes(2, "big")
    return bytes((one,)) if one >= 0 else b"?"

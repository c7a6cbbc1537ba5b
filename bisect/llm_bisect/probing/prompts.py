"""Prompts of an exact token count, with needles at several depths.

A prompt is built of token ids, so that its length is exact by construction: the body is text of about the
right length (from the tokens per character of a sample), tokenised once and cut or padded in its last
stretch of filler; the question is tokenised by itself and appended. That takes three calls of the
tokenizer at most. The text begins with a salt and its sentences are in an order of the salt's own, so
that no cached prefix fits.

    salt · filler · needle at 0.1 · filler · needle at 0.5 · filler · needle at 0.9 · filler · question
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The last four letters of each name differ: a question's last bytes then point to one needle only.
NAMES = (
    "amber", "cobalt", "indigo", "violet", "crimson", "jasmine", "saffron", "scarlet",
    "emerald", "magenta", "walnut", "granite", "turquoise", "lavender", "copper", "marigold",
)  # fmt: skip

_SENTENCES = (
    "The river bends twice before it reaches the old mill.",
    "A gardener keeps the tools in a shed behind the house.",
    "Most of the letters were written on thin grey paper.",
    "The train left the valley while the fog was still low.",
    "Bread was baked in the morning and sold before noon.",
    "Her notes describe the birds that rest on the northern shore.",
    "They measured the field with a rope and a wooden pole.",
    "The museum shows maps that nobody has used for ages.",
    "A quiet street leads from the harbour to the market.",
    "The clock in the tower is slow during cold winters.",
    "Students carried the benches out into the courtyard.",
    "Rain fell on the roof and the lamps were lit early.",
    "The recipe asks for flour, salt, water and patience.",
    "Two brothers repaired the bridge with stones from the hill.",
    "The library closes when the last reader goes home.",
    "An engineer drew the plan again from memory.",
    "Sheep graze on the slope above the empty village.",
    "The orchestra tuned its instruments behind the curtain.",
    "Nobody could say who had painted the blue door.",
    "The path along the cliff is closed after storms.",
    "Merchants traded wool for spices and polished glass.",
    "The dog waited at the gate until the evening.",
    "Every chapter of the book begins with a weather report.",
    "The lake freezes from the edges towards the middle.",
)

_MARGIN = 1.03  # the body is written this much too long and then cut
_TAIL = 0.04  # the last share of the body is always filler, so that it can be cut
_SAMPLE_CHARS = 4000
LEAST_DIFFERENT = 3  # different tokens that any real tokenizer gives for that sample


@dataclass(frozen=True)
class Needle:
    """A fact hidden in the prompt."""

    depth: float  # 0 = head, 1 = tail
    name: str
    digits: str

    @property
    def sentence(self) -> str:
        return f"The secret code for {self.name} is {self.digits}. "

    @property
    def question(self) -> str:
        return f"\nThe secret code for {self.name} is"

    def found_in(self, answer: str) -> bool:
        """True where the digits stand in the answer, exactly: neither near misses nor parts of longer
        numbers."""
        return re.search(rf"(?<!\d){self.digits}(?!\d)", answer) is not None


@dataclass(frozen=True)
class Prompt:
    """A prompt without its question, and the needles in the order in which they are asked."""

    body: tuple[int, ...]
    needles: tuple[Needle, ...]
    first: tuple[int, ...]  # the body with the first question: exactly the length asked for

    def follow_up(self, question: Sequence[int]) -> list[int]:
        """Token ids of the same prompt with another question; never longer than the first."""
        return [*self.body[: max(0, len(self.first) - len(question))], *question]


Tokenize = Callable[[str, bool], list[int]]
"""(text, with the tokens that open a text) → token ids."""


class PromptMaker:
    """Makes prompts for one boot; it remembers how many tokens a character costs there."""

    def __init__(self, tokenize: Tokenize) -> None:
        self._tokenize = tokenize
        self._tokens_per_char: float | None = None

    def make(self, tokens: int, *, salt: str, depths: Sequence[float], rotate: bool = False) -> Prompt:
        """A prompt of exactly `tokens` tokens, its first question included. Without depths, no needle is
        hidden.

        Needles that would not fit are left out, from the last. `rotate`: which needle is asked first
        depends on the salt (for engines where a second question costs as much as the first). Raises
        ValueError below 8 tokens.
        """
        if tokens < 8:
            raise ValueError("a prompt needs 8 tokens at least")
        rng = random.Random(f"prompt:{salt}")  # noqa: S311 - nothing secret: it only has to differ per salt
        needles = _needles(depths, rng)
        rate = self._rate(rng)
        while needles and _needs_tokens(needles, rate) > tokens:
            needles = needles[:-1]
        if rotate and needles:
            turn = int(hashlib.sha256(salt.encode()).hexdigest(), 16) % len(needles)
            needles = needles[turn:] + needles[:turn]
        question = self._tokenize(needles[0].question, False) if needles else []
        wanted = tokens - len(question)
        body = self._body(wanted, rate, salt, needles, rng)
        return Prompt(tuple(body), tuple(needles), (*body, *question))

    def _rate(self, rng: random.Random) -> float:
        if self._tokens_per_char is None:
            sample = _filler(_SAMPLE_CHARS, rng)
            ids = self._tokenize(sample, False)
            if len(set(ids)) < LEAST_DIFFERENT:
                raise ValueError(f"a text of {len(sample):,} characters came back as {len(ids)} tokens")
            self._tokens_per_char = max(0.01, len(ids) / len(sample))
        return self._tokens_per_char

    def _body(
        self, wanted: int, rate: float, salt: str, needles: Sequence[Needle], rng: random.Random
    ) -> list[int]:
        text, needed = _text(wanted / rate, salt, needles, rng)
        ids = self._tokenize(text, True)
        if needed * len(ids) / len(text) > wanted:
            # the text is denser than the sample was: the cut would take the last needle
            rate = len(ids) / len(text)
            self._tokens_per_char = rate
            text, _ = _text(wanted / rate, salt, needles, rng)
            ids = self._tokenize(text, True)
        if not ids:
            raise ValueError("the engine returned no tokens for a text")
        while len(ids) < wanted:
            # repeat a stretch of the last filler
            ids += ids[-max(1, min(wanted - len(ids), int(len(ids) * _TAIL))) :]
        return ids[:wanted]


def _needles(depths: Sequence[float], rng: random.Random) -> list[Needle]:
    """One needle per depth, nearest to the head first (the hardest to recall, so it is asked first)."""
    names = rng.sample(NAMES, k=min(len(depths), len(NAMES)))
    return [
        Needle(depth=depth, name=name, digits=f"{rng.randrange(10_000, 100_000)}")
        for depth, name in zip(sorted(depths), names, strict=False)
    ]


def _needs_tokens(needles: Sequence[Needle], rate: float) -> float:
    """Tokens for salt, needles and a question, with room for filler between them."""
    text = sum(len(needle.sentence) for needle in needles) + len(needles[0].question) + 80
    return 1.3 * rate * text + 8


def _text(chars: float, salt: str, needles: Sequence[Needle], rng: random.Random) -> tuple[str, int]:
    """The body, and how many of its characters must be kept.

    The needle at depth d begins at about d × `chars`; the last 4 % are filler.
    """
    head = f"[{hashlib.sha256(salt.encode()).hexdigest()[:16]}] "
    ordered = sorted(needles, key=lambda one: one.depth)
    starts, end = [], chars * (1 - _TAIL)
    for needle in reversed(ordered):  # from the tail on, so that none is pushed out
        end = min(needle.depth * chars, end - len(needle.sentence))
        starts.append(int(end))
    parts, length = [head], len(head)
    for needle, start in zip(ordered, reversed(starts), strict=True):
        if start > length:
            parts.append(_filler(start - length, rng))
            length = start
        parts.append(needle.sentence)
        length += len(needle.sentence)
    parts.append(_filler(max(0, int(chars * _MARGIN - length)) + 16, rng))
    return "".join(parts), length if needles else 0


def _filler(chars: int, rng: random.Random) -> str:
    """`chars` characters of sentences in random order, the last one cut."""
    parts: list[str] = []
    length = 0
    while length < chars:
        sentence = rng.choice(_SENTENCES) + " "
        parts.append(sentence)
        length += len(sentence)
    text = "".join(parts)[:chars]
    # a needle must begin at the beginning of a word
    return text[:-1] + " " if text and not text.endswith(" ") else text

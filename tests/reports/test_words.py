"""Scrubbing and cleaning of text that leaves the machine or comes from logs."""

from __future__ import annotations

import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.reports import words
from llm_bisect.reports.words import duration, one_line, scrub, scrub_all


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/alice/models/x.gguf", "~/models/x.gguf"),
        ("see /root/.cache and /rooted", "see ~/.cache and /rooted"),
        ("http://192.168.1.7:8000/v1", "http://(address):8000/v1"),
        ("127.0.0.1:8000 0.0.0.0", "127.0.0.1:8000 0.0.0.0"),
        ("on fe80::1%eth0 and ::1", "on (address) and ::1"),
        ("2001:db8::7 at 12:30:45", "(address) at 12:30:45"),
        ("GPU-8f4a1c2b-1111-2222-3333-444455556666 busy", "GPU-… busy"),
        ("std::bad_alloc in a::b", "std::bad_alloc in a::b"),
        ("driver 580.159.04, vllm 0.11.2", "driver 580.159.04, vllm 0.11.2"),
        ("--api-key sk-abcdefghijklmnopqrst", "--api-key ***"),
    ],
)
def test_scrub(text: str, expected: str) -> None:
    """Personal things go, everything else stays readable."""
    assert scrub(text) == expected


def test_host_and_user_names_go_unless_they_are_common_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine called `docker` must not mangle the text."""
    monkeypatch.setattr(platform, "node", lambda: "rigbox.lan")
    monkeypatch.setattr(words.getpass, "getuser", lambda: "alice")
    assert scrub("alice@rigbox.lan, rigbox, rigboxes") == "(user)@(host), (host), rigboxes"
    monkeypatch.setattr(platform, "node", lambda: "docker")
    assert scrub("docker run") == "docker run"


def test_scrub_all_reaches_every_text() -> None:
    """Keys and values at any depth; numbers stay numbers."""
    assert scrub_all({"/home/a/x": [1, {"b": ("/root/y", None)}]}) == {"~/x": [1, {"b": ["~/y", None]}]}


@given(st.text(max_size=400))
def test_one_line_is_one_printable_line(text: str) -> None:
    """Whatever comes in: one line, bounded, without control or direction characters."""
    line = one_line(text, 80)
    assert len(line) <= 80
    assert "\n" not in line and "\x1b" not in line and "\u202e" not in line


def test_durations() -> None:
    """Each size of time has its form."""
    assert [duration(s) for s in (7.2, 42, 252, 7500)] == ["7.2 s", "42 s", "4 min 12 s", "2 h 05 min"]

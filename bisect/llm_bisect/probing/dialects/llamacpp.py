"""llama-server: /tokenize, /completion with token ids and prompt progress, /slots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llm_bisect.probing.dialects.base import Answer, NoTokenizer, Reading, as_float, as_int, parse, token_ids
from llm_bisect.probing.wire import Api

_FIELDS = [
    "content",
    "stop",
    "error",
    "timings",
    "tokens_evaluated",
    "tokens_predicted",
    "truncated",
    "stop_type",
]


class LlamaCpp:
    """Speaks llama-server's own API (not its OpenAI-compatible one, which shows less)."""

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self._at = {"tokenize": "/tokenize", "complete": "/completion", "slots": "/slots", **endpoints}

    def tokenize(self, api: Api, text: str, *, special: bool) -> list[int]:
        status, body = api.post(
            self._at["tokenize"],
            {"content": text, "add_special": special},
            timeout_s=300.0,
            limit_bytes=max(8 * 1024 * 1024, 16 * len(text)),
        )
        ids = token_ids(parse(body).get("tokens"))
        if status != 200 or ids is None:
            raise NoTokenizer(f"HTTP {status}")
        return ids

    def request(
        self, api: Api, prompt: Sequence[int], max_tokens: int, *, may_reuse: bool
    ) -> tuple[str, Mapping[str, Any]]:
        return self._at["complete"], {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": 0,
            "stream": True,
            "return_progress": True,
            "cache_prompt": may_reuse,
            # without this the last chunk repeats the whole prompt
            "response_fields": _FIELDS,
        }

    def read(self, data: Mapping[str, Any], answer: Answer) -> None:
        if data.get("error"):
            answer.error = json.dumps(data)[:20_000]
            return
        progress = data.get("prompt_progress")
        if isinstance(progress, dict):
            answer.processed_tokens = as_int(progress.get("processed"))
            answer.total_tokens = as_int(progress.get("total"))
            answer.cached_tokens = as_int(progress.get("cache"))
        text = data.get("content")
        if isinstance(text, str) and text:
            answer.text += text
            answer.pieces += 1
        timings = data.get("timings")
        if isinstance(timings, dict):
            cached, computed = as_int(timings.get("cache_n")), as_int(timings.get("prompt_n"))
            answer.cached_tokens = cached if cached is not None else answer.cached_tokens
            if computed is not None:
                answer.prompt_tokens = computed + (cached or 0)
            answer.completion_tokens = as_int(timings.get("predicted_n"))
            answer.prefill_tps = as_float(timings.get("prompt_per_second"))
            answer.decode_tps = as_float(timings.get("predicted_per_second"))
        evaluated = as_int(data.get("tokens_evaluated"))
        if evaluated:
            answer.prompt_tokens = evaluated
        if data.get("stop") is True:
            answer.finished = True

    def look(self, api: Api) -> Reading | None:
        # the answer waits for the batch at hand, which may take long on a big prompt
        status, body = api.get(self._at["slots"], timeout_s=20.0)
        if status != 200:
            return None
        try:
            slots = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(slots, list):
            return None
        busy, tokens, mark = False, None, []
        for slot in slots:
            if not isinstance(slot, dict) or slot.get("is_processing") is not True:
                continue
            busy = True
            done = as_int(slot.get("n_prompt_tokens_processed"))
            next_token = slot.get("next_token")
            first = next_token[0] if isinstance(next_token, list) and next_token else next_token
            decoded = as_int(first.get("n_decoded")) if isinstance(first, dict) else None
            if done is not None:
                tokens = max(tokens or 0, done)
            mark += [float(done or 0), float(decoded or 0)]
        return Reading(mark=tuple(mark), tokens=tokens, busy=busy, source="slots")

    def reuses_prompts(self, api: Api) -> bool:
        return True  # unless the model's memory cannot be cut back: the first follow-up shows

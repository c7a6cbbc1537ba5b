"""vLLM (and engines that copy its API): /tokenize, /v1/completions with token ids, /metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llm_bisect.probing.dialects.base import Answer, NoTokenizer, Reading, as_int, parse, token_ids
from llm_bisect.probing.wire import Api, CallFailed

_METRIC = re.compile(
    r"^(?:vllm|sglang):(?P<name>\w+)(?:\{(?P<labels>[^\n]{0,4000}?)\})? (?P<value>[-+.\deE]+)", re.M
)
_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')
_BLOCK_TOKENS = re.compile(r'\bblock_size="(\d+)"')
_CACHING = re.compile(r'enable_prefix_caching="(True|False)"')
_LONG_CHARS = 1000
_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage")


class Vllm:
    """Speaks the OpenAI-compatible API with vLLM's additions."""

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self._at = {
            "tokenize": "/tokenize",
            "complete": "/v1/completions",
            "metrics": "/metrics",
            "models": "/v1/models",
            **endpoints,
        }
        self._model: str | None = None
        self._idle_usage = 0.0

    def tokenize(self, api: Api, text: str, *, special: bool) -> list[int]:
        status, body = api.post(
            self._at["tokenize"],
            {"model": self._name(api), "prompt": text, "add_special_tokens": special},
            timeout_s=300.0,
            limit_bytes=max(8 * 1024 * 1024, 16 * len(text)),
        )
        ids = token_ids(parse(body).get("tokens"))
        middle = text.find(" ", len(text) // 2)
        if status == 400 and middle > 0 and len(text) > _LONG_CHARS:
            # some refuse to tokenise more than the context holds, and a body is written a little too long
            return [
                *self.tokenize(api, text[:middle], special=special),
                *self.tokenize(api, text[middle:], special=False),
            ]
        if status != 200 or ids is None:
            raise NoTokenizer(f"HTTP {status}")
        return ids

    def request(
        self, api: Api, prompt: Sequence[int], max_tokens: int, *, may_reuse: bool
    ) -> tuple[str, Mapping[str, Any]]:
        return self._at["complete"], {
            "model": self._name(api),
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, data: Mapping[str, Any], answer: Answer) -> None:
        if data.get("error") or data.get("object") == "error":
            answer.error = json.dumps(data)[:20_000]
            return
        for choice in data.get("choices") or ():
            if not isinstance(choice, dict):
                continue
            part = choice.get("delta") or choice.get("message") or choice
            for key in ("text", "content", "reasoning_content", "reasoning"):
                text = part.get(key) if isinstance(part, dict) else None
                if isinstance(text, str) and text:
                    answer.text += text
                    answer.pieces += 1
            if choice.get("finish_reason"):
                answer.finished = True
        usage = data.get("usage")
        if isinstance(usage, dict):
            answer.prompt_tokens = as_int(usage.get("prompt_tokens")) or answer.prompt_tokens
            answer.completion_tokens = as_int(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            cached = as_int(details.get("cached_tokens")) if isinstance(details, dict) else None
            answer.cached_tokens = cached if cached is not None else answer.cached_tokens

    def look(self, api: Api) -> Reading | None:
        metrics, labels = self._metrics(api)
        if not metrics:
            return None
        running = metrics.get("num_requests_running", metrics.get("num_running_reqs"))
        usage = next((metrics[name] for name in _USAGE if name in metrics), None)
        if running is None and usage is None:
            return None
        busy = None if running is None else running > 0
        pool = _pool_tokens(labels)
        if usage is not None and busy is False:
            self._idle_usage = usage
        tokens = None
        if usage is not None and pool is not None and busy:
            tokens = max(0, round((usage - self._idle_usage) * pool))
        counted = ("prompt_tokens_total", "generation_tokens_total", "kv_used_tokens")
        mark = (running or 0.0, usage or 0.0, *(metrics.get(name, 0.0) for name in counted))
        return Reading(mark=mark, tokens=tokens, busy=busy, source="metrics")

    def reuses_prompts(self, api: Api) -> bool:
        _, labels = self._metrics(api)
        found = _CACHING.search(labels)
        return found is None or found[1] == "True"

    def _metrics(self, api: Api) -> tuple[dict[str, float], str]:
        """Values by name (summed over label sets), and the labels of the cache's configuration."""
        status, body = api.get(self._at["metrics"], timeout_s=10.0)
        if status != 200:
            return {}, ""
        values: dict[str, float] = {}
        labels = ""
        for found in _METRIC.finditer(body.decode("utf-8", "replace")):
            try:
                values[found["name"]] = values.get(found["name"], 0.0) + float(found["value"])
            except ValueError:
                continue
            if found["name"] == "cache_config_info":
                labels = found["labels"] or ""
        return values, labels

    def _name(self, api: Api) -> str:
        """The served model's name, asked once."""
        if self._model is None:
            status, body = api.get(self._at["models"], timeout_s=30.0)
            models = parse(body).get("data")
            first = models[0] if isinstance(models, list) and models else None
            if status != 200 or not isinstance(first, dict) or not isinstance(first.get("id"), str):
                raise CallFailed("garbage")
            self._model = str(first["id"])
        return self._model


def _pool_tokens(labels: str) -> int | None:
    blocks, size = _BLOCKS.search(labels), _BLOCK_TOKENS.search(labels)
    return int(blocks[1]) * int(size[1]) if blocks and size else None

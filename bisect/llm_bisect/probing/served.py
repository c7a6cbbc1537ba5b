"""What a booted engine itself says that it serves: facts that some logs do not print."""

from __future__ import annotations

from collections.abc import Mapping

from llm_bisect.model.evidence import Fact
from llm_bisect.probing.dialects.base import as_int, parse
from llm_bisect.probing.wire import Api, CallFailed
from llm_bisect.runners.protocol import Engine
from llm_bisect.spaces.engines import EngineDescription


def served_facts(about: EngineDescription, engine: Engine) -> dict[str, Fact]:
    """`context_tokens` (of one request) and `model`, where the engine answers; {} where it does not."""
    api = Api(engine.base_url, engine.api_key)
    facts: dict[str, Fact] = {}
    model = _first_model(_get(api, about.endpoints.get("models")))
    if isinstance(name := model.get("id"), str):
        facts["model"] = name[-120:]
    if context := as_int(model.get("max_model_len")):
        facts["context_tokens"] = context
    settings = _get(api, about.endpoints.get("props")).get("default_generation_settings")
    if isinstance(settings, dict) and (context := as_int(settings.get("n_ctx"))):
        facts["context_tokens"] = context
    return facts


def _get(api: Api, path: str | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        status, body = api.get(path)
    except CallFailed:
        return {}
    return parse(body) if status == 200 else {}


def _first_model(data: Mapping[str, object]) -> dict[str, object]:
    models = data.get("data")
    first = models[0] if isinstance(models, list) and models else None
    return first if isinstance(first, dict) else {}

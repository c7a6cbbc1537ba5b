"""The part of vLLM's /metrics that watchers of a prefill read."""

from __future__ import annotations

from llm_bisect.runners.sim.engine import SimEngine


def metrics_text(engine: SimEngine, waiting: int) -> str:
    """Prometheus text. Counters move when a request ends; the pool's use moves with every chunk."""
    model, boot = engine.settings.served_name, engine.boot
    label = f'engine="0",model_name="{model}"'
    config = (
        f'block_size="{boot.block_tokens}",cache_dtype="{engine.settings.kv_dtype}",'
        f'enable_prefix_caching="{engine.settings.prefix_caching}",engine="0",'
        f'gpu_memory_utilization="{engine.settings.gpu_memory_utilization}",'
        f'kv_cache_size_tokens="{boot.kv_tokens}",num_gpu_blocks="{boot.blocks}"'
    )
    lines: list[str] = []

    def add(name: str, kind: str, value: float, labels: str = label) -> None:
        bare = name.removesuffix("_total") if kind == "counter" else name
        lines.extend((f"# TYPE vllm:{bare} {kind}", f"vllm:{name}{{{labels}}} {float(value)}"))

    add("num_requests_running", "gauge", engine.running)
    add("num_requests_waiting", "gauge", waiting)
    add("kv_cache_usage_perc", "gauge", engine.kv_usage)
    add("num_preemptions_total", "counter", 0)
    add("prompt_tokens_total", "counter", engine.prompt_tokens_total)
    add("generation_tokens_total", "counter", engine.generation_tokens_total)
    add("request_success_total", "counter", engine.requests_total, f'{label},finished_reason="length"')
    add("cache_config_info", "gauge", 1.0, config)
    return "\n".join(lines) + "\n"

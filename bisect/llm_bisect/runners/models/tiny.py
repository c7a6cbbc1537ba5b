"""A tiny random-weight Llama (GGUF, 1.5 MB) that llama-server loads; deterministic.

KV cache in f16: 4 * LAYERS * KV_HEADS * HEAD_DIM bytes a token: 1 KiB. Residual
channel 0 is a constant that the output matrix turns into a bias, so that only printable ASCII comes out:
random bytes would be no valid UTF-8, and llama-server answers those with 500.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from llm_bisect.runners.models.tokens import PRINTABLE, add_tokenizer, write_file

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 2, 4, 4, 32, 256
CONTEXT_TOKENS = 262144
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(path: Path) -> None:
    """Write the model to `path`."""
    width = HEADS * HEAD_DIM
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny-random-llama")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    vocabulary = add_tokenizer(writer, _CHATML)

    def random(rows: int, columns: int, *, scale: float = 0.05, silent: bool = False) -> np.ndarray:
        weights = (rng.standard_normal((rows, columns)) * scale).astype(np.float32)
        if silent:
            weights[0, :] = 0  # never writes the constant channel
        return weights

    def tensor(name: str, weights: np.ndarray) -> None:
        writer.add_tensor(f"{name}.weight", weights)

    embedding = random(vocabulary, width, scale=1.0)
    embedding[:, 0] = 8.0
    output = random(vocabulary, width)
    output[:, 0] = -8.0
    output[PRINTABLE, 0] = 8.0
    tensor("token_embd", embedding)
    tensor("output_norm", np.ones(width, np.float32))
    tensor("output", output)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensor(f"{block}.attn_norm", np.ones(width, np.float32))
        tensor(f"{block}.attn_q", random(width, width))
        tensor(f"{block}.attn_k", random(KV_HEADS * HEAD_DIM, width))
        tensor(f"{block}.attn_v", random(KV_HEADS * HEAD_DIM, width))
        tensor(f"{block}.attn_output", random(width, width, silent=True))
        tensor(f"{block}.ffn_norm", np.ones(width, np.float32))
        tensor(f"{block}.ffn_gate", random(FEED_FORWARD, width))
        tensor(f"{block}.ffn_up", random(FEED_FORWARD, width))
        tensor(f"{block}.ffn_down", random(width, FEED_FORWARD, silent=True))
    write_file(writer)

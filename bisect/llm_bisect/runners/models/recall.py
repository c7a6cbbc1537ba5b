"""A hand-built (not trained) Llama (GGUF, 1.5 MB) that really recalls: an induction machine.

Four layers of one head. Three layers address by position (RoPE) and copy the codes from 1, 2 and 4 tokens
before, so that every position holds its last 8 bytes; the fourth attends to the place whose preceding 7
bytes equal the prompt's last 7 bytes and copies the byte found there. After "… The secret code is 48190. …
The secret code is" greedy decoding answers " 48190.", at any depth, as long as the KV cache is intact.
KV cache in f16: 2 KiB a token.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from llm_bisect.runners.models.tokens import PRINTABLE, add_tokenizer, write_file

CONTEXT_TOKENS = 262144
WIDTH, HEAD_DIM = 128, 128
_PAIRS, _CODE = 16, 13  # rotating pairs of RoPE that carry the position; length of a byte's code
_PREDICTION, _CONSTANT = 8 * _CODE, 9 * _CODE  # residual: 8 codes, the prediction, a constant
_CONSTANT_VALUE = 4.0
_POSITION_SHARPNESS, _MATCH_SHARPNESS = 8.0, 40.0
_ROPE_BASE = 10000.0
_SEED, _TRIES = 1, 120
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write(path: Path, *, match_sharpness: float = _MATCH_SHARPNESS) -> None:
    """Write the model to `path`. A `match_sharpness` of 1.2 loses recall between 4,000 and 8,000 tokens."""
    angles = _angles()
    factors = np.full(HEAD_DIM // 2, 1e30, np.float32)  # pairs that do not rotate
    factors[:_PAIRS] = _ROPE_BASE ** (-2 * np.arange(_PAIRS) / HEAD_DIM) / angles
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("recall-machine")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(4)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(_ROPE_BASE)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    vocabulary = add_tokenizer(writer, _TEMPLATE)
    codes = _codes(vocabulary)

    def tensor(name: str, weights: np.ndarray) -> None:
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(weights, np.float32))

    embedding = np.zeros((vocabulary, WIDTH), np.float32)
    embedding[:, :_CODE] = codes
    embedding[:, _CONSTANT] = _CONSTANT_VALUE
    output = np.zeros((vocabulary, WIDTH))
    output[:, _PREDICTION : _PREDICTION + _CODE] = codes * 3.0
    output[:, _CONSTANT] = -40.0
    output[[10, *PRINTABLE], _CONSTANT] = 0.0  # only printable ASCII and newline come out
    tensor("token_embd", embedding)
    tensor("output_norm", np.ones(WIDTH))
    tensor("rope_freqs", factors)
    tensor("output", output)
    for layer, (back, held) in enumerate(((1, 1), (2, 2), (4, 4), (0, 8))):
        q, k, v, o = _copy_back(back, held, angles) if back else _match(held, match_sharpness)
        block = f"blk.{layer}"
        tensor(f"{block}.attn_norm", np.ones(WIDTH))
        tensor(f"{block}.attn_q", q)
        tensor(f"{block}.attn_k", k)
        tensor(f"{block}.attn_v", v)
        tensor(f"{block}.attn_output", o)
        tensor(f"{block}.ffn_norm", np.ones(WIDTH))
        tensor(f"{block}.ffn_gate", np.zeros((32, WIDTH)))
        tensor(f"{block}.ffn_up", np.zeros((32, WIDTH)))
        tensor(f"{block}.ffn_down", np.zeros((WIDTH, 32)))
    write_file(writer)


def _norm(held: int) -> float:
    """What the layer's RMS norm divides by where `held` codes are in the residual."""
    return float(np.sqrt((_CONSTANT_VALUE**2 + held * _CODE) / WIDTH))


def _blank() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.zeros((HEAD_DIM, WIDTH)),
        np.zeros((HEAD_DIM, WIDTH)),
        np.zeros((HEAD_DIM, WIDTH)),
        np.zeros((WIDTH, HEAD_DIM)),
    )


def _copy_back(
    back: int, held: int, angles: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Attend to the position `back` tokens before, and copy the `held` codes that it holds."""
    q, k, v, o = _blank()
    norm = _norm(held)
    sharp = _POSITION_SHARPNESS * np.sqrt(HEAD_DIM) * norm / _CONSTANT_VALUE
    q[0 : 2 * _PAIRS : 2, _CONSTANT] = sharp * np.cos(back * angles)
    q[1 : 2 * _PAIRS : 2, _CONSTANT] = -sharp * np.sin(back * angles)
    k[0 : 2 * _PAIRS : 2, _CONSTANT] = norm / _CONSTANT_VALUE
    size = held * _CODE
    v[:size, :size] = np.eye(size) * norm
    o[size : 2 * size, :size] = np.eye(size)
    return q, k, v, o


def _match(held: int, sharpness: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Attend to the position whose 7 codes before equal the last 7 here, and predict its code."""
    q, k, v, o = _blank()
    norm = _norm(held)
    size = 7 * _CODE
    rows = slice(2 * _PAIRS, 2 * _PAIRS + size)
    q[rows, :size] = np.eye(size) * norm * sharpness * np.sqrt(HEAD_DIM) / _CODE * 4
    k[rows, _CODE : _CODE + size] = np.eye(size) * norm / 4
    v[:_CODE, :_CODE] = np.eye(_CODE) * norm
    o[_PREDICTION : _PREDICTION + _CODE, :_CODE] = np.eye(_CODE)
    return q, k, v, o


def _angles() -> np.ndarray:
    """Angles a token whose summed cosines have the lowest side lobe of `_TRIES` draws."""
    rng = np.random.default_rng(_SEED)
    distance = np.arange(1, CONTEXT_TOKENS, dtype=np.float64)
    best_peak, best = np.inf, np.zeros(_PAIRS)
    for _ in range(_TRIES):
        angles = rng.uniform(0.15, 3.0, _PAIRS)
        total = np.zeros(CONTEXT_TOKENS - 1)
        for angle in angles:
            total += np.cos(angle * distance)
        if total.max() < best_peak:
            best_peak, best = float(total.max()), angles
    return best


def _codes(count: int) -> np.ndarray:
    """`count` codes of norm sqrt(_CODE), pushed apart a little."""
    rng = np.random.default_rng(_SEED)
    codes = rng.standard_normal((count, _CODE))
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    for _ in range(400):
        gram = codes @ codes.T
        np.fill_diagonal(gram, -1)
        push = np.exp(12 * (gram - gram.max()))
        codes -= 0.05 * (push @ codes) / push.sum(1, keepdims=True).clip(1e-9)
        codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    scaled: np.ndarray = codes * np.sqrt(_CODE)
    return scaled

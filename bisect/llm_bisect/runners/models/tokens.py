"""The tokenizer of the built-in models: one token per byte, so that tokens equal UTF-8 bytes."""

from __future__ import annotations

import gguf

PRINTABLE = range(32, 127)
BOS, EOS = 257, 259
_MERGED = (ord("Q"), ord("Z"))  # one harmless merge keeps every loader happy


def byte_unicode() -> dict[int, str]:
    """GPT-2's reversible table from bytes to printable characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(plain))
    return table


def add_tokenizer(writer: gguf.GGUFWriter, template: str) -> int:
    """Write the tokenizer's keys; the size of its vocabulary."""
    table = byte_unicode()
    first, second = (table[byte] for byte in _MERGED)
    tokens = [table[byte] for byte in range(256)]
    tokens += [first + second, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    types = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 3
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{first} {second}"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(BOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    return len(tokens)


def write_file(writer: gguf.GGUFWriter) -> None:
    """Write header, keys and tensors, and close."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

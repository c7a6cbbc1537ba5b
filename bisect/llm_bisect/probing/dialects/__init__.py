"""How each family of engines is spoken to."""

from llm_bisect.probing.dialects.base import Answer, Dialect, NoTokenizer, Reading
from llm_bisect.probing.dialects.llamacpp import LlamaCpp
from llm_bisect.probing.dialects.vllm import Vllm
from llm_bisect.spaces.engines import EngineDescription

__all__ = ["Answer", "Dialect", "NoTokenizer", "Reading", "dialect_for"]


def dialect_for(engine: EngineDescription) -> Dialect:
    """A fresh dialect for one boot of `engine`."""
    return LlamaCpp(engine.endpoints) if engine.dialect == "llamacpp" else Vllm(engine.endpoints)

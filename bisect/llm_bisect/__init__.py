"""llm-bisect: finds how far an LLM serving configuration can be pushed, and proves it."""

from llm_bisect._version import __version__

__all__ = ["__version__"]

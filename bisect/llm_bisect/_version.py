"""The version of the distribution llm-bisect."""

__version__ = "0.1.0"

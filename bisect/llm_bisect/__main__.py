"""`python -m llm_bisect` (`python -m bisect` would run the standard library's module)."""

from llm_bisect.cli import main

if __name__ == "__main__":
    main()

"""The simulated vLLM: a physical model of a rig, and a server process that speaks vLLM's HTTP API over it.

`physics` is pure arithmetic, `engine` gives it time and memory, `server` speaks HTTP. Only `rig` reads
files; the server's own process needs nothing but the standard library, so that it starts at once.
"""

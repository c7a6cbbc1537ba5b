"""Runners by name. Each is imported only when it is asked for: Docker's client alone takes 0.1 s."""

from __future__ import annotations

from llm_bisect.model import UsageProblem
from llm_bisect.runners.protocol import Runner

RUNNER_NAMES = ("docker", "process", "simulated")


def make_runner(name: str) -> Runner:
    """The runner of that name. Raises UsageProblem for another name, EnvironmentProblem where it cannot
    work on this machine."""
    if name == "docker":
        from llm_bisect.runners.docker_runner import DockerRunner

        return DockerRunner()
    if name == "process":
        from llm_bisect.runners.process_runner import ProcessRunner

        return ProcessRunner()
    if name == "simulated":
        from llm_bisect.runners.simulated_runner import SimulatedRunner

        return SimulatedRunner()
    raise UsageProblem(f"there is no runner {name!r}", hint=f"known: {', '.join(RUNNER_NAMES)}")

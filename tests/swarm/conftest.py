"""Fixtures of the swarm tests."""

from collections.abc import Callable

import openai
import pytest
from swarm_processes import Swarm


@pytest.fixture
def client() -> Callable[[Swarm], openai.OpenAI]:
    """The official client for a swarm."""

    def make(swarm: Swarm) -> openai.OpenAI:
        return openai.OpenAI(base_url=swarm.base_url, api_key="none", timeout=90, max_retries=0)

    return make

import pytest

import engine
from engine import Executor
from tests.engine.pools import smollm2


@pytest.fixture(scope="session")
def real_model() -> Executor:
    """SmolLM2; each test binds a pool of its own."""
    return engine.load(str(smollm2()), executor="reference", kv_dtype="f32")

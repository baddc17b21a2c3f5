import pytest
import torch
from hypothesis import settings

settings.register_profile("queries", derandomize=True, deadline=None)
settings.load_profile("queries")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)

"""Fixtures of the tests of the recorder."""

import pytest
import torch

import safeops
from tests.debug.recording import Positive


@pytest.fixture
def model():
    return Positive()


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.fixture
def record(tmp_path):
    """record(model, optimizer, **options): a recorder that writes into the test's folder and raises nothing."""
    made = []

    def make(model, optimizer, **options):
        made.append(safeops.debug.recorder(model, optimizer, **{"folder": tmp_path, "action": "record", **options}))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()

import pytest

import safeops


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

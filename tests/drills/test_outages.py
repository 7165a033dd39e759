from pathlib import Path

import pytest

from tests.name_server import why_no_namespace
from tools.drills.outages import OUTAGES, run_drill


@pytest.mark.skipif(bool(why_no_namespace()), reason=why_no_namespace())
@pytest.mark.parametrize(("outages", "seconds"), [
    (("none", "black hole", "no names"), 8.0),
    pytest.param(OUTAGES, 600.0, marks=[pytest.mark.soak, pytest.mark.timeout(3000)]),
])  # fmt: skip
def test_an_outage_of_mlflow_or_of_names_costs_no_training_time_and_no_data(
    outages: tuple[str, ...], seconds: float, tmp_path: Path
):
    results = run_drill(tmp_path, outages, min(seconds, 120.0), seconds)
    assert [result.outage for result in results] == list(outages)
    for result in results:
        assert result.sent_after == result.updates > 0
        assert result.call_seconds < 0.05 * result.seconds  # the drill's limit is 1 %, on a quiet machine

"""The benchmark of the host's work: the simulated device's clock, and one small update."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tools.bench.host import __main__ as host
from tools.bench.host.device import MAX_PENDING, ImageClock, SimulatedDevice

SLACK = 0.05  # CPU seconds that a test's own lines take at most


def test_the_device_waits_until_its_first_operation_and_not_while_the_host_is_ahead() -> None:
    device = SimulatedDevice()
    device.advance(2.0)  # the host packs
    device.launch(3.0, 100, 0.001, "packing")
    device.advance(1.0)  # behind the device
    device.launch(3.0, 100, 0.001, "next")
    device.synchronize()
    device.end("end")
    assert device.busy == 6.0
    assert device.now == pytest.approx(2.0 + 6.0, abs=SLACK)
    assert device.idle["packing"] == pytest.approx(2.0, abs=SLACK)
    assert device.idle["launches"] + device.idle["next"] + device.idle["end"] < SLACK


def test_the_device_waits_for_launches_that_take_longer_than_its_work() -> None:
    device = SimulatedDevice()
    device.launch(1.0, 1000, 0.003, "start")
    assert device.idle["launches"] == pytest.approx(2.0, abs=SLACK)


def test_the_host_waits_while_a_stream_is_full() -> None:
    device = SimulatedDevice()
    device.launch(10.0, 10 * MAX_PENDING, 1e-6, "start")
    assert device.now == pytest.approx(9.0, abs=SLACK)  # the rest is as many operations as the stream holds


def test_paused_work_takes_no_time() -> None:
    device, begun = SimulatedDevice(), time.thread_time()
    with device.paused():
        while time.thread_time() < begun + 0.2:
            pass
    assert device.now < 0.1


def test_images_are_cut_in_turn_by_the_workers() -> None:
    device = SimulatedDevice()
    images = ImageClock(device, workers=2, seconds=1.0)
    images.schedule([b"1", b"2", b"3", b"1"])
    assert images.wait([b"1", b"2"]) == pytest.approx(1.0, abs=SLACK)
    assert images.wait([b"3"]) == pytest.approx(1.0, abs=SLACK)
    assert images.wait([b"1"]) == 0.0


@pytest.mark.slow
def test_an_update_of_two_episodes_accounts_for_host_and_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "host.json"
    assert host.main(["--quick", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    parts = ["groups", "metrics, accounting", "pixels", "plan", "samples", "tensors"]
    assert sorted(found["host"]) == parts
    assert all(seconds > 0 for seconds in found["host"].values())
    assert 2 * 9 / 4 <= found["images"] < 2 * 9  # of a rank of four; micro-batches have some in common
    assert found["launches"]["train"] > 2 * found["launches"]["score"] > 0
    idle = sum(found["idle"].values())
    assert found["waited"] == pytest.approx(idle / (idle + found["busy"]))
    assert "goal: under 2%" in capsys.readouterr().out


def test_a_model_that_the_bench_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--config-name", "30b_a3b_4node"]) == 2
    assert "not a dense Qwen3-VL" in capsys.readouterr().err

"""What nvidia-smi reports of the GPUs that this process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_webrl.launch.gpus import NvidiaSmiError, query_gpus


def test_visible_gpus_are_read_from_nvidia_smi_and_its_failures_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(text: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NvidiaSmiError, match="nvidia-smi is not installed"):
        query_gpus("memory.total")
    install("echo '0, GPU-aa, 81559'; echo '1, GPU-ab, 40960'")
    for visible, sizes in (
        (None, ["81559", "40960"]), ("1", ["40960"]), ("GPU-ab,0", ["40960", "81559"]), ("MIG-1,MIG-2", ["81559"] * 2),
    ):  # fmt: skip
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [row[0] for row in query_gpus("memory.total")] == sizes
    install("echo 'Unable to determine the device handle' >&2; exit 15")
    with pytest.raises(NvidiaSmiError, match="nvidia-smi failed: Unable to determine the device handle"):
        query_gpus("memory.total")
    install("exit 0")
    with pytest.raises(NvidiaSmiError, match="lists no GPU"):
        query_gpus("memory.total")

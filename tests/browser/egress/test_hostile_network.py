"""No packet of a hostile page leaves for a forbidden address.

At least 500 URLs (ssrf_corpus.py), each by navigation, redirect, sub-resource, fetch, form and WebSocket, from a page
of the open web in real Chromium, which has no sandbox of the network here: policy and proxy alone are tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_webrl.browser.egress.egress_policy import JOB_ADDRESSES_VARIABLE
from tests.browser.egress.ssrf_corpus import JOB

USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
UNSHARE = ["unshare", *USER, "--net", "--mount", "--kill-child", "--fork"]
REASON = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False).stderr.strip()


@pytest.mark.parametrize("share", ["quick", pytest.param("full", marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.skipif(bool(REASON), reason=REASON or "-")
def test_no_packet_of_a_hostile_page_leaves_for_a_forbidden_address(share: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [*UNSHARE, sys.executable, "-m", "tests.browser.egress.hostile_network", str(result), share]
    subprocess.run(command, env={**os.environ, JOB_ADDRESSES_VARIABLE: JOB}, check=True)
    found = json.loads(result.read_text())
    assert found["urls"] >= 500
    assert found["forbidden"] == {}
    assert found["packets of the control"] > 0
    assert found["allowed packets"] > 0
    for way, reasons in found["refused"].items():
        assert way == "navigation" or {"loopback", "private", "metadata"} <= reasons.keys(), way

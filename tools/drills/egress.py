"""`python -m tools.drills.egress`: no packet of a hostile page leaves for a forbidden address.

At least 500 URLs (tools/drills/ssrf_corpus.py), each by navigation, redirect, sub-resource, fetch, form and WebSocket,
from a page of the open web in real Chromium, which has no sandbox of the network here: policy and proxy alone are
tested. The network is a namespace in which every address exists (tools/drills/egress_world.py); it counts packets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_webrl.browser.egress.egress_policy import JOB_ADDRESSES_VARIABLE
from tools.drills.report import Findings, run
from tools.drills.ssrf_corpus import JOB, PUBLIC

MIN_URLS = 500
LIMIT_SECONDS = 3000.0


def why_not() -> str:
    """Why this machine cannot run the drill; empty if it can."""
    done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def measure(quick: bool) -> Findings:
    with tempfile.TemporaryDirectory(prefix="egress-") as folder:
        result = Path(folder) / "result.json"
        command = [
            *_unshare(),
            sys.executable,
            "-m",
            "tools.drills.egress_world",
            str(result),
            "quick" if quick else "full",
        ]
        environment = {**os.environ, JOB_ADDRESSES_VARIABLE: JOB}
        subprocess.run(command, env=environment, timeout=LIMIT_SECONDS, check=True)
        found = Findings(json.loads(result.read_text()))
    figures = found.figures
    found.expect(figures["urls"] >= MIN_URLS, f"{figures['urls']} URLs; at least {MIN_URLS} are wanted")
    found.expect(figures["forbidden packets"] == 0, f"forbidden packets: {figures['forbidden']}")
    found.expect(figures["packets of the control"] > 0, "the counter did not see the packets of the control")
    found.expect(figures["allowed packets"] > 0, f"no page of {PUBLIC} was reached")
    for way, reasons in figures["refused"].items():
        for reason in ("loopback", "private", "metadata"):
            found.expect(reasons.get(reason, 0) > 0 or way == "navigation", f"{way}: nothing was refused as {reason}")
    return found


def _unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--kill-child", "--fork"]


if __name__ == "__main__":
    sys.exit(run("egress", __doc__ or "", measure))

"""vLLM's model runner V2, which GPUs run, on the CPU: Triton's interpreter computes its kernels."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron_webrl.model.vision_language.routing_replay import MODEL_RUNNER

SITE = Path(__file__).with_name("triton_interpreter")


def select_v2() -> None:
    """Let engines of this process and of its children take V2. To be called before vLLM is imported."""
    assert "vllm" not in sys.modules, "vLLM has looked for Triton already"
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update({MODEL_RUNNER: "1", "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)})
    runpy.run_path(str(SITE / "sitecustomize.py"))


def is_v2() -> bool:
    """Whether engines take V2."""
    return os.environ.get(MODEL_RUNNER) == "1"

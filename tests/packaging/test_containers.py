"""The recipes in launch/containers parse, and name the versions that setup.py names. No image is built here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import write_program
from tools.check_gpu_packages.__main__ import transformer_engine_version

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "launch" / "containers"
SCRIPTS = (
    "launch/containers/enroot.sh",
    "launch/containers/transformer_engine.sh",
    "tools/install.sh",
    "tools/lock_requirements.sh",
)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, continued lines joined."""

    name: str
    value: str


def dockerfile() -> list[Instruction]:
    lines = [line for line in (CONTAINERS / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stages() -> list[list[Instruction]]:
    """The instructions of each stage, from its FROM on."""
    parts: list[list[Instruction]] = []
    for each in dockerfile():
        if each.name == "FROM":
            parts.append([])
        if parts:
            parts[-1].append(each)
    return parts


def shell_parses(script: str, shell: str = "bash") -> None:
    checked = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=20, check=False)
    assert checked.returncode == 0, f"{script}\n{checked.stderr}"


def setup_pin(name: str) -> str:
    return re.findall(rf'"{name}==([0-9.]+)', (ROOT / "setup.py").read_text())[-1]


def test_the_image_is_vllms_of_the_version_that_setup_py_pins() -> None:
    first, *_ = dockerfile()
    assert first == Instruction("ARG", f"VLLM_VERSION={setup_pin('vllm')}")
    bases = [each.value.split()[0] for each in dockerfile() if each.name == "FROM"]
    assert bases == ["vllm/vllm-openai:v${VLLM_VERSION}"] * 2
    lock = (ROOT / "requirements" / "gpu-py312.txt").read_text()
    assert f"\nmegatron-core=={setup_pin('megatron-core')}\n" in lock
    built, last = stages()
    assert last[-1] == Instruction("RUN", "webrl check")
    assert Instruction("ENTRYPOINT", "[]") in last
    for stage, words in ((built, "build python3 /wheels"), (last, "install python3 /tmp/wheels")):
        assert any(f"transformer_engine.sh {words}" in each.value for each in stage if each.name == "RUN")


def test_every_command_of_the_dockerfile_parses() -> None:
    for each in dockerfile():
        if each.name == "RUN":
            shell_parses(each.value)
        elif each.name in ("CMD", "ENTRYPOINT", "SHELL"):
            assert isinstance(json.loads(each.value), list)


def test_the_dockerfile_copies_what_exists_and_is_in_its_context() -> None:
    patterns = (CONTAINERS / "Dockerfile.dockerignore").read_text().split()
    kept = {pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")}
    copies = [each.value.split()[:-1] for each in dockerfile() if each.name == "COPY" and "--from=" not in each.value]
    copied = {source for sources in copies for source in sources}
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)


def test_the_apptainer_recipe_parses() -> None:
    _, *parts = re.split(r"^%", (CONTAINERS / "webrl.def").read_text(), flags=re.MULTILINE)
    sections = dict(part.split("\n", 1) for part in parts)
    for name in ("environment", "runscript", "test"):
        shell_parses(sections[name], "sh")
    [path] = re.findall(r"PLAYWRIGHT_BROWSERS_PATH=\S+", (CONTAINERS / "Dockerfile").read_text())
    assert path in sections["environment"]


def test_an_enroot_image_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    def import_image(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", CONTAINERS / "enroot.sh", *arguments], cwd=tmp_path, timeout=20,
            env={**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    missing = import_image()
    assert (missing.returncode, "enroot is not installed" in missing.stderr) == (1, True)
    (tmp_path / "bin").mkdir()  # of a stand-in, which writes its arguments into the image
    write_program(tmp_path / "bin" / "enroot", 'echo "$@" >"$3"\n[ "$4" != docker://no/such ] || exit 3')
    done = import_image()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "megatron-webrl.sqsh").read_text().split()[3] == "dockerd://megatron-webrl:latest"
    assert done.stdout.endswith(f"CONTAINER={tmp_path}/megatron-webrl.sqsh PYTHON=python3\n")
    again = import_image()
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("enroot.sh: megatron-webrl.sqsh exists")
    assert import_image("docker://no/such", "other.sqsh").returncode == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "megatron-webrl.sqsh"]


ENGINE_VERSION = transformer_engine_version()
PYTHON_WITH_A_PIP_OF_ITS_OWN = """[ "$1" = -m ] || exec {python} "$@"
echo "$@" >>{calls}
[ "$3" = list ] || exit 0
crt=13.5.37
! grep -q wheel-dir {calls} || {{ crt=13.0.1 && echo nvidia-cuda-crt-extra==1; }}
echo torch==2.13.0
echo nvidia-cuda-crt==$crt"""


def transformer_engine(folder: Path, action: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """A run of the script with a Python whose pip only writes down its calls; the run, and the calls."""
    python, calls = folder / "python", folder / "calls"
    write_program(python, PYTHON_WITH_A_PIP_OF_ITS_OWN.format(python=sys.executable, calls=calls))
    done = subprocess.run(
        ["bash", CONTAINERS / "transformer_engine.sh", action, python, folder / "wheels"], capture_output=True,
        env={**os.environ, "PYTHONPATH": str(folder)}, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done, calls.read_text()


def test_transformer_engine_is_built_for_the_cuda_of_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class version: cuda = '13.0'")
    done, calls = transformer_engine(tmp_path, "build")
    assert done.returncode == 0, done.stderr
    _, headers, wheel, _, added, replaced = calls.splitlines()
    assert "nvidia-cuda-runtime==13.0.* nvidia-cuda-crt==13.0.*" in headers
    assert wheel.endswith(f"--wheel-dir {tmp_path}/wheels transformer-engine-torch=={ENGINE_VERSION}")
    # What the build adds and replaces is put back.
    assert (added, replaced) == (
        "-m pip uninstall --yes nvidia-cuda-crt-extra", "-m pip install --no-deps nvidia-cuda-crt==13.5.37"
    )  # fmt: skip


def install_a_distribution(folder: Path, name: str, version: str, library: bool) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "RECORD").write_text(f"lib/{name}.so,,\n")
    if library:
        (folder / "lib").mkdir(exist_ok=True)
        (folder / "lib" / f"{name}.so").touch()


def test_transformer_engine_without_its_libraries_fails_the_image(tmp_path: Path) -> None:
    for number, (version, library, says) in enumerate((
        (ENGINE_VERSION, True, ""),
        (ENGINE_VERSION, False, "transformer_engine_torch has no .so"),
        ("2.19.0", True, f"transformer_engine_torch is 2.19.0, not {ENGINE_VERSION}"),
    )):  # fmt: skip
        (folder := tmp_path / str(number)).mkdir()
        install_a_distribution(folder, "transformer_engine_cu13", ENGINE_VERSION, library=True)
        install_a_distribution(folder, "transformer_engine_torch", version, library)
        done, calls = transformer_engine(folder, "install")
        assert (done.returncode == 0) == (not says), done.stderr
        assert says in done.stderr
        assert calls.endswith(f"transformer-engine[core-cu13,pytorch]=={ENGINE_VERSION}\n")


def missing_packages(lock: Path, image: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A run of the script with the packages of a folder, or, without one, of this environment."""
    alone = () if image is None else ("-S",)
    return subprocess.run(
        [sys.executable, *alone, CONTAINERS / "missing_packages.py", lock],
        env={**os.environ, "PYTHONPATH": str(image or "")}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_an_image_without_vllm_is_refused_and_no_library_of_nvidia_is_added(tmp_path: Path) -> None:
    """The tests' environment has vLLM's CPU build and all else, so it is an image without vLLM."""
    lock = tmp_path / "lock.txt"
    lock.write_text("nvidia-nothing==1.0\nnumpy==0.1\nnot-installed-here==1.2\nvllm==0.32.0\n")
    done = missing_packages(lock)
    assert done.returncode == 1
    assert "vllm is missing, the lock has 0.32.0; build on an image that has it" in done.stderr
    assert f"numpy {importlib.metadata.version('numpy')} becomes 0.1" in done.stderr
    assert "nvidia-nothing stays away, the lock has 1.0" in done.stderr
    assert done.stdout == "numpy==0.1\nnot-installed-here==1.2\n"


def resolve(folder: Path, requirements: Iterable[str]) -> dict[str, str]:
    """The pins that satisfy requirements on a GPU node, from the index. Raises CalledProcessError: there are none."""
    (folder / "requirements.in").write_text("\n".join(requirements))
    command = [Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version=3.12", "--python-platform=x86_64-manylinux_2_31", "requirements.in"]
    variables = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    found = subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True, text=True, timeout=300)
    return dict(line.split("==") for line in found.stdout.split() if "==" in line)


@pytest.mark.slow
def test_the_image_gets_the_versions_of_the_lock_and_all_of_it_fits_together(tmp_path: Path) -> None:
    """On an image with what vLLM alone brings from the index."""
    lock, image = ROOT / "requirements" / "gpu-py312.txt", tmp_path / "image"
    image.mkdir()
    pins = dict(line.split("==") for line in lock.read_text().split())
    found = resolve(tmp_path, [f"vllm=={setup_pin('vllm')}"])
    for name, version in found.items():
        install_a_distribution(image, name, version, library=False)
    done = missing_packages(lock, image)
    assert done.returncode == 0, done.stderr
    missing = dict(line.split("==") for line in done.stdout.split())
    together = found | missing
    for name, version in pins.items():
        if together.get(name) != version:
            assert name.startswith("nvidia-")
            assert f"{name} stays {found.get(name, 'away')}, the lock has {version}" in done.stderr
        elif name in found.keys() & missing.keys():
            assert f"{name} {found[name]} becomes {version}" in done.stderr
    fixed = [f"{name}=={version}" for name, version in together.items()]
    engine = f"transformer-engine[core-cu13,pytorch]=={ENGINE_VERSION}"
    assert resolve(tmp_path, [engine, *fixed]).items() > together.items()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_no_objections() -> None:
    checked = subprocess.run(
        ["shellcheck", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout

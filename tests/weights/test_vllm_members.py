"""vLLM's classes have the methods and attributes that this project uses of their objects."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import textwrap
from pathlib import Path

import pytest
from vllm.compilation.counter import CompilationCounter
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

import megatron_webrl

PACKAGE = Path(megatron_webrl.__file__).parent
ENGINE, WORKER, SCHEDULER = (
    "rollout/engine/vllm_engine.py", "weights/vllm_worker.py", "weights/vllm_scheduler.py"
)  # fmt: skip


def used(file: str, owner: str, within: str | None = None) -> set[str]:
    """Names of the members of `owner`, an expression, in a file or a class of it, less those that the class defines."""
    tree: ast.AST = ast.parse((PACKAGE / file).read_text())
    own: set[str] = set()
    if within is not None:
        [tree] = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == within)
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if ast.unparse(node.value) == owner} - own


def members(kind: type) -> set[str]:
    """Names of a class, and of what its methods, or those of its bases, assign to `self`."""
    found = set(dir(kind))
    for base in kind.__mro__[:-1]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        stores = (
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        )
        found |= {node.attr for node in stores if ast.unparse(node.value) == "self"} | set(base.__annotations__)
    return found


@pytest.mark.parametrize(
    ("file", "owner", "within", "kinds", "least"),
    [
        (WORKER, "self", "WeightReceiver", (Worker, CPUWorker), 6),
        (WORKER, "compilation_counter", None, (CompilationCounter,), 1),
        (SCHEDULER, "self", "_Recomputing", (Scheduler, AsyncScheduler), 1),
        (ENGINE, "self._llm", None, (AsyncLLM,), 9),
        (ENGINE, "self._llm.engine_core", None, (AsyncMPClient,), 1),
        ("rollout/engine/vllm_environment.py", "llm", None, (AsyncLLM,), 1),
    ],
)
def test_vllm_has_the_members_that_are_used(
    file: str, owner: str, within: str | None, kinds: tuple[type, ...], least: int
) -> None:
    names = used(file, owner, within)
    assert len(names) >= least, "the expression has another name"
    for kind in kinds:
        assert names <= members(kind), f"{kind.__name__} lacks {sorted(names - members(kind))}"


def test_both_model_runners_count_the_graphs_that_they_capture() -> None:
    """The count that a rank reports; CUDA graphs cannot be captured on the CPU."""
    for module in ("vllm.compilation.cuda_graph", "vllm.v1.worker.gpu.cudagraph_utils"):  # of V1 and parts of V2; of V2
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text()
        captures = [each for each in source.split("\n") if "torch.cuda.graph(" in each and "`" not in each]
        assert len(captures) == source.count("compilation_counter.num_cudagraph_captured += 1") == 1

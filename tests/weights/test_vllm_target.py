"""Slices written into a real vLLM model: log-probabilities, memory, and failed transfers.

Run as a process with a model's folder and the file of its report, it starts an engine and runs all scenarios.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise

from megatron_webrl.config.schema import Config
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.processor import Processor, decode_image
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.weights.engine_map import EngineMap, EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.slices import box_index
from megatron_webrl.weights.vllm_target import ModelTarget, check_vllm_version
from tests.rollout.engine.engines import expected, perturb, picture
from tests.weights.serving import load
from tools.make_tiny_model import make_tiny_model

TOLERANCE = 1e-4
ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, Any]] = {
    # The vocabulary of the first is padded, and its output head shares the embedding's memory.
    "dense": {"vocabulary": 1000, "seed": 0},
    "experts": {"experts": 4, "tie": False, "seed": 1},
}
RESPONSE = 24
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
Piece = tuple[str, tuple[int | slice, ...], Tensor]


# -- the process ------------------------------------------------------------------------------------------------------


class EngineHarness:
    """An engine, the same model in transformers, and the target under test."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(folder),
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=32 * 2**20,
            max_model_len=1024,
            limit_mm_per_prompt={"image": 1, "video": 0},
            enable_prefix_caching=False,
        )
        workers: list[Any] = []
        self.llm.collective_rpc(workers.append)
        self.worker = workers[0]
        self.module = self.worker.model_runner.get_model()
        self.reference: Any = load(folder)
        self.processor, self.seed, self.hf_config = Processor.load(str(folder)), 0, self.reference.config
        self.expected = engine_parameter_shapes(self.hf_config, EngineSizes(), 0)
        self.make = partial(ModelTarget, self.module, self.worker.vllm_config, self.worker.device)
        self.target = self.make(self.expected)

    def pieces(self) -> Iterator[Piece]:
        """Every slice of the reference's weights for a single rank: parameter, place in it, values."""
        state, engine_map = self.reference.state_dict(), EngineMap(self.hf_config, EngineSizes())
        for mapping in parameter_mappings(self.hf_config, "transposed"):
            part = state[mapping.hf_param][mapping.part_index]
            for shard in engine_map.shards_of(mapping, 0):
                yield (
                    shard.engine_param,
                    box_index(shard.parameter_offset, shard.size),
                    part[box_index(shard.tensor_offset, shard.size)],
                )

    def write(self, pieces: Any) -> None:
        for parameter, place, values in pieces:
            self.target.tensor(parameter)[place].copy_(values)
            self.target.mark_written(parameter, values.numel())

    def perturb(self) -> None:
        self.seed += 1
        perturb(self.reference, self.seed)

    def difference(self) -> float:
        """Largest difference of random responses' log-probabilities from transformers, with a new image and without."""
        found = []
        for images in ([picture(self.seed, 96, 64)], []):
            self.seed += 1
            response = np.random.default_rng(self.seed).integers(300, 900, RESPONSE)
            content = [{"type": "text", "text": f"Click {self.seed}."}, *({"type": "image"} for _ in images)]
            chat = self.processor.encode_chat([{"role": "user", "content": content}])
            request: dict[str, Any] = {"prompt_token_ids": [*chat.tolist(), *response.tolist()]}
            if images:
                request["multi_modal_data"] = {"image": [decode_image(data) for data in images]}
            [output] = self.llm.generate([request], SAMPLING, use_tqdm=False)
            answer: Any = SimpleNamespace(
                prompt_token_ids=output.prompt_token_ids[:-RESPONSE], response_token_ids=response
            )
            engine: Any = SimpleNamespace(processor=self.processor)
            places = zip(output.prompt_logprobs[-RESPONSE:], response.tolist(), strict=True)
            scores = np.array([place[token].logprob for place, token in places])
            found.append(np.abs(scores - expected(self.reference, engine, answer, images)).max())
        return float(max(found))

    def memory(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self.module.named_parameters() if p.numel()}

    def open_layers(self) -> int:
        packed = [m for m in self.module.modules() if hasattr(m, "cpu_linear") and not hasattr(m, "shard_indices")]
        return sum(m.weight.numel() > 0 for m in packed)


def refusals(harness: EngineHarness) -> list[str]:
    """Errors for a plan with a wrong shape, an extra parameter and a missing parameter."""
    norm = "language_model.model.norm.weight"
    without = {name: shape for name, shape in harness.expected.items() if name != norm}
    wrong = [harness.expected | {norm: (3,)}, harness.expected | {"no.such.weight": (2, 2)}, without]
    return [_error(lambda expected=expected: harness.make(expected)) for expected in wrong]


def _error(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def updates(harness: EngineHarness) -> dict[str, Any]:
    """An update in plan order and one in random order, each scored before and after."""
    addresses, rounds, opened = harness.memory(), [], 0
    for shuffled in (False, True):
        harness.perturb()
        stale, pieces = harness.difference(), list(harness.pieces())
        if shuffled:
            random.Random(5).shuffle(pieces)
        harness.target.start_update()
        for piece in pieces:
            harness.write([piece])
            opened = opened if shuffled else max(opened, harness.open_layers())
        harness.target.finish_update()
        rounds.append((stale, harness.difference()))
    moved = sorted(name for name, address in harness.memory().items() if addresses[name] != address)
    return {"rounds": rounds, "moved": moved, "open": opened}


def failure(harness: EngineHarness) -> dict[str, Any]:
    """Transfers that are aborted within layers, then a complete one."""
    addresses = harness.memory()
    report: dict[str, Any] = {"partially_updated": [harness.target.partially_updated]}
    harness.perturb()
    pieces = list(harness.pieces())
    harness.target.start_update()
    report["partially_updated"].append(harness.target.partially_updated)
    for end in (1, len(pieces) // 3, len(pieces) - 1):
        random.Random(end).shuffle(pieces)
        harness.target.start_update()
        harness.write(pieces[:end])
        harness.target.abort_update()
        report["partially_updated"].append(harness.target.partially_updated)
    report["open"], report["moved"] = harness.open_layers(), harness.memory() != addresses
    report["halfway"] = harness.difference()
    harness.target.start_update()
    harness.write(harness.pieces())
    harness.target.finish_update()
    report["partially_updated"].append(harness.target.partially_updated)
    report["healed"] = harness.difference()
    return report


def faults(harness: EngineHarness) -> dict[str, str]:
    """Errors for missing, extra, unknown and untimely slices. Leaves the engine complete."""
    harness.target.start_update()
    found = {"unknown": _error(lambda: harness.target.tensor("no.such.weight"))}
    pieces = list(harness.pieces())
    harness.write(pieces[:-1])
    found["incomplete"] = _error(harness.target.finish_update)
    harness.write(pieces[-1:])
    found["again"] = _error(lambda: harness.target.tensor(pieces[-1][0]))
    found["more"] = _error(lambda: harness.target.mark_written(pieces[-1][0], 1))
    harness.target.finish_update()
    found["outside"] = _error(lambda: harness.target.tensor(pieces[0][0]))
    found["last"] = pieces[-1][0]
    return found


def main(folder: Path, result: Path) -> None:
    harness = EngineHarness(folder)
    report: dict[str, Any] = {
        "refusals": refusals(harness),
        "load_paths": harness.target.load_paths(),
        "live": sorted(name for name in harness.expected if harness.target.in_place_tensor(name) is not None),
        "loaded": harness.difference(),
        "updates": updates(harness),
        "failure": failure(harness),
        "faults": faults(harness),
    }
    result.write_text(json.dumps(report))


# -- what its report shows ----------------------------------------------------------------------------------------


def run(module: str, *arguments: str | Path, seconds: float = 800.0) -> Any:
    """Run a module as a process; returns its report, read from the last argument."""
    config = Config()
    config.model.platform = "cpu"
    environment = os.environ | vllm_environment.engine_environment(config)
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # test functions are pickled to the workers
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(Path(arguments[-1]).read_text())


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow, pytest.mark.engine]) for name in MODELS]
)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder / "model", **MODELS[request.param])
    found = run(__name__, folder / "model", folder / "report.json")
    assert found["loaded"] < TOLERANCE, "the engine differs from transformers before any update"
    return found | {"name": request.param}


def test_after_each_update_log_probabilities_equal_those_of_transformers_and_kernels_keep_their_memory(
    report: Any,
) -> None:
    updates = report["updates"]
    for stale, fresh in updates["rounds"]:
        assert fresh < TOLERANCE < 100 * TOLERANCE < stale, "an update that changes nothing would prove nothing"
    assert updates["moved"] == []
    assert updates["open"] == 1, "one layer at a time holds its loading form"


def test_packed_layers_are_reloaded_and_the_others_written_in_place(report: Any) -> None:
    reloaded = {name for name, way in report["load_paths"].items() if way == "reload"}
    linear = ("qkv", "proj", "linear_fc1", "linear_fc2", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "gate")
    packed = {name for name in report["load_paths"] if name.split(".")[-2] in linear and name.endswith(".weight")}
    packed |= {name for name in report["load_paths"] if name.endswith(("w13_weight", "w2_weight"))}
    assert reloaded == packed - {"visual.patch_embed.proj.weight"}
    assert report["live"] == sorted(set(report["load_paths"]) - reloaded)
    assert len(reloaded) > 20
    assert ("language_model.lm_head.weight" in report["load_paths"]) == (report["name"] == "experts")


def test_a_failed_transfer_leaves_a_running_partial_model_that_a_complete_one_repairs(report: Any) -> None:
    failure = report["failure"]
    assert failure["partially_updated"] == [False, False, True, True, True, False]
    assert failure["open"] == 0
    assert not failure["moved"]
    assert failure["healed"] < TOLERANCE < 100 * TOLERANCE < failure["halfway"]


def test_a_plan_and_slices_that_do_not_match_are_refused_by_name(report: Any) -> None:
    wrong, unknown, missing = report["refusals"]
    assert "parameter language_model.model.norm.weight" in wrong
    assert "holds (128,), the plan has (3,)" in wrong
    assert "parameter no.such.weight" in unknown
    assert "parameter language_model.model.norm.weight" in missing
    faults = report["faults"]
    last = faults["last"]
    assert faults["incomplete"].startswith(f"RuntimeError: parameter {last}: 0 of ")
    assert faults["again"].startswith(f"RuntimeError: parameter {last} is complete")
    assert faults["more"].startswith(f"RuntimeError: parameter {last} has ")
    assert "no.such.weight" in faults["unknown"]
    assert "outside a transfer" in faults["outside"]


class Summed(QuantizeMethodBase):
    """Its kernel computes with the sum of the layer's two parameters, in place of the first."""

    processed = 0

    def create_weights(self, layer: Any, *arguments: Any, **options: Any) -> None: ...

    def apply(self, layer: Any, *arguments: Any, **options: Any) -> Any: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.one.data = layer.one + layer.two
        self.processed += 1


def test_a_layer_of_several_parameters_is_processed_once_all_of_them_are_complete() -> None:
    layer: Any = torch.nn.Module()
    configuration: Any = None  # of vLLM: this layer needs none
    for name in ("one", "two"):
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False))
    layer.quant_method, kernel = Summed(), layer.one
    model = torch.nn.ModuleDict({"layer": layer})
    layerwise.record_metadata_for_reloading(model)
    shapes = {"layer.one": (2, 3), "layer.two": (2, 3)}
    target = ModelTarget(model, configuration, torch.device("cpu"), shapes)
    for version, order in enumerate((["one", "two"], ["two", "one"]), 1):
        target.start_update()
        for name in order:
            for row in range(2):
                target.tensor(f"layer.{name}")[row] = version * (10 if name == "one" else 1)
                target.mark_written(f"layer.{name}", 3)
        target.finish_update()
        assert (layer.one is kernel, layer.quant_method.processed) == (True, version)
        assert layer.one.eq(11 * version).all()


def test_unsupported_versions_of_vllm_are_refused() -> None:
    check_vllm_version("0.32.4")
    for version in ("0.31.2", "0.33.0", "0.320.0"):
        with pytest.raises(RuntimeError, match=rf"vLLM {version} "):
            check_vllm_version(version)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

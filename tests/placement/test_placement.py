"""Who runs where: nothing shared, nothing left over, groups inside nodes wherever they fit."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from rich.console import Console

from megatron_webrl.cli import main
from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.local import run_here
from megatron_webrl.launch.roles import process_specs
from megatron_webrl.placement.cores import format_cores, parse_cores
from megatron_webrl.placement.hardware import CARDS, Rates
from megatron_webrl.placement.placement import place_processes, visible_devices
from megatron_webrl.placement.placement_table import find_model_config
from megatron_webrl.placement.prediction import EpisodeLengths, StartEstimate, predict_training
from tests.config.conftest import refusal

ROOT = Path(__file__).parents[2]
CLUSTERS = [*sorted((ROOT / "configs").glob("*node.yaml")), *sorted((ROOT / "configs" / "published").glob("*.yaml"))]
ORDER = "tp-cp-ep-dp-pp"
NO_GPUS = ("cluster.gpus_per_node=0", "cluster.engine_gpus_per_node=0", "trainer.data_parallel=1", "rollout.engines=1")
EIGHT = ("cluster.gpus_per_node=8", "cluster.engine_gpus_per_node=4", "trainer.data_parallel=0", "rollout.engines=0")


def made(*overrides: str) -> Config:
    return parse_config(None, list(overrides))


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    """Any layout that can be placed, on GPUs or without."""
    one_of = st.sampled_from
    tp, cp, pp, ep = draw(one_of([1, 2, 4])), draw(one_of([1, 2])), draw(st.integers(1, 4)), draw(one_of([1, 2, 4, 8]))
    share = tp * draw(st.integers(1, 6))
    engine_tp, engine_pp = draw(one_of([1, 2, 4])), draw(st.integers(1, 3))
    serving = engine_tp * draw(st.integers(1, 4))
    copies, engine = pp * math.lcm(tp * cp, ep), engine_tp * engine_pp
    fitting = math.lcm(copies // math.gcd(copies, share), engine // math.gcd(engine, serving))  # nodes, or a multiple
    assume(fitting <= 16)
    nodes = fitting * draw(st.integers(1, max(1, 8 // fitting)))
    config = Config()  # what `read` gives, without the time that it takes
    trainer, rollout = config.trainer, config.rollout
    trainer.tensor_parallel, trainer.context_parallel = tp, cp
    trainer.pipeline_parallel, trainer.expert_parallel = pp, ep
    rollout.tensor_parallel, rollout.pipeline_parallel = engine_tp, engine_pp
    trainer.data_parallel = nodes * share // (tp * cp * pp)
    rollout.engines = nodes * serving // (engine_tp * engine_pp)
    config.cluster.nodes = nodes
    if draw(st.booleans()):
        config.cluster.gpus_per_node, config.cluster.engine_gpus_per_node = share + serving, serving
    numa = draw(st.integers(0, 3))
    each = 4 * (share + serving) + draw(st.integers(0, 9))
    config.cluster.numa_cores = [f"{i * each}-{(i + 1) * each - 1}" for i in range(numa)]
    return config


@given(configurations())
@settings(max_examples=50)
def test_devices_cores_and_ports_of_a_node_are_all_used_and_by_one_process_each(config: Config) -> None:
    found, cluster = place_processes(config), config.cluster
    every_core = sorted(core for text in cluster.numa_cores for core in parse_cores(text))
    for node in range(cluster.nodes):
        here = found.on_node(node)
        assert sorted(gpu for process in here for gpu in process.devices) == list(range(cluster.gpus_per_node))
        assert sorted(core for process in here for core in process.cores) == every_core
        assert all(process.cores for process in here) or not every_core
        ports = [process.port for process in here] + [found.control_port]
        assert len(set(ports)) == len(ports)
        assert [process.local_rank for process in here if process.role == "trainer"] == list(
            range(len(found.rings[node].ranks))
        )
    assert sorted(process.index for process in found.of_role("trainer")) == list(range(config.trainer_world_size))
    assert len({process.name for process in found.processes}) == len(found.processes)
    assert found == place_processes(config)


@given(configurations())
@settings(max_examples=50)
def test_every_engine_is_whole_and_writes_to_one_ring_which_the_ranks_of_its_node_read(config: Config) -> None:
    found = place_processes(config)
    workers = [process for process in found.of_role("rollout") if process.follower == 0]
    assert [process.index for process in workers] == list(range(config.rollout.engines))
    assert sorted(worker for ring in found.rings for worker in ring.workers) == list(range(config.rollout.engines))
    assert sorted(rank for ring in found.rings for rank in ring.ranks) == list(range(config.trainer_world_size))
    assert len({ring.name for ring in found.rings}) == config.cluster.nodes
    home = {process.index: process.node for process in workers}
    assert all(home[worker] == ring.node for ring in found.rings for worker in ring.workers)
    if config.cluster.gpus_per_node:
        held = Counter(process.index for process in found.of_role("rollout") for _ in process.devices)
        assert set(held.values()) == {config.ranks_per_engine}
        assert all(len(process.devices) % config.rollout.tensor_parallel == 0 for process in found.of_role("rollout"))


@given(configurations())
@settings(max_examples=50)
def test_groups_of_megatrons_own_order_lie_inside_nodes_wherever_they_fit(config: Config) -> None:
    trainer, found = config.trainer, place_processes(config)
    node = {process.index: process.node for process in found.of_role("trainer")}
    share = config.trainer_world_size // config.cluster.nodes
    tp, pp, cp, ep = (
        trainer.tensor_parallel, trainer.pipeline_parallel, trainer.context_parallel, trainer.expert_parallel
    )  # fmt: skip
    dense = RankGenerator(tp=tp, ep=1, dp=trainer.data_parallel, pp=pp, cp=cp, order=ORDER)
    sparse = RankGenerator(tp=1, ep=ep, dp=config.trainer_world_size // pp // ep, pp=pp, cp=1, order=ORDER)

    def inside(groups: list[list[int]]) -> int:
        return sum(len({node[rank] for rank in group}) == 1 for group in groups)

    assert inside(dense.get_ranks("tp")) == config.trainer_world_size // tp
    # As many as there is room for: on each node, the share over the group's size.
    if ep > tp * cp:  # the experts take more ranks than the rest of a copy
        stage, copies = sparse.get_ranks("ep"), sparse.get_ranks("ep-pp")
    else:
        stage, copies = dense.get_ranks("tp-cp"), dense.get_ranks("tp-cp-pp")
    assert inside(stage) == config.cluster.nodes * (share // len(stage[0]))
    assert inside(copies) == config.cluster.nodes * (share // len(copies[0]))


def test_cores_are_taken_near_a_processs_gpu_first_and_the_rest_shared_by_workers() -> None:
    described = "cluster.numa_cores=['0-15,32-47','16-31,48-63']"
    found = place_processes(made(*EIGHT, described, "trainer.image_workers=1", "cluster.nics=[a,a,b,b,c,c,d,d]"))
    numa = [set(parse_cores(text)) for text in ("0-15,32-47", "16-31,48-63")]
    for process, home in zip(found.on_node(0), (0, 0, 0, 0, 1, 1, 1, 1), strict=True):
        assert len(numa[home].intersection(process.cores)) >= 7  # workers share what the ranks leave, too
        assert len(process.cores) == (7 if process.role == "trainer" else 9)
        assert process.nics == ("aabbccdd"[process.devices[0]],)
    found = place_processes(made(*EIGHT, "cluster.numa_cores=['0-55','56-111']"))
    ranks, workers = found.on_node(0)[:4], found.on_node(0)[4:]
    assert [format_cores(process.cores) for process in ranks] == ["0-7", "8-15", "16-23", "24-31"]
    assert {len(process.cores) for process in workers} == {20}
    assert all(sum(core >= 56 for core in process.cores) == 14 for process in workers)
    for cores, image_workers, expected in (
        (112, 2, 8), (112, 4, 10), (224, 2, 8), (48, 2, 6), (24, 2, 3), (16, 2, 3), (112, 0, 6)
    ):  # fmt: skip
        settings = (f"cluster.numa_cores=[0-{cores - 1}]", f"trainer.image_workers={image_workers}")
        ranks = place_processes(made(*EIGHT, *settings)).of_role("trainer")
        assert {len(process.cores) for process in ranks} == {expected}, settings


def test_a_configuration_that_describes_no_machines_has_one_node_without_gpus() -> None:
    config = made("rollout.engines=3", "trainer.data_parallel=2")
    assert config.cluster == ClusterConfig()
    assert [process.name for process in place_processes(config).on_node(0)] == [
        "trainer-0", "trainer-1", "rollout-0", "rollout-1", "rollout-2"
    ]  # fmt: skip
    for each, device in ((config, None), (made(*EIGHT, "rollout.tensor_parallel=2"), "6,7")):
        specs = process_specs(each, place_processes(each), 0, ["trainer", "rollout"], "", {})
        assert [s.environment.get("CUDA_VISIBLE_DEVICES") for s in specs if s.name == "rollout-1"] == [device]


def test_devices_are_counted_among_those_that_are_visible() -> None:
    for devices, visible, count, expected in (
        ((1, 3), "", 4, "1,3"), ((1, 3), "4,5,6,7", 4, "5,7"), ((0,), "GPU-a,GPU-b", 2, "GPU-a"),
    ):  # fmt: skip
        assert visible_devices(devices, visible, count) == expected
    with pytest.raises(ConfigError, match=r"cluster.gpus_per_node=4, but CUDA_VISIBLE_DEVICES=0,1 allows 2; "):
        visible_devices((0,), "0,1", 4)


def test_a_launcher_of_one_machine_refuses_several_nodes() -> None:
    with pytest.raises(ConfigError, match=r"cluster.nodes=2, but this command runs all roles on one machine"):
        run_here(made("cluster.nodes=2"), Console())


def test_what_cannot_be_placed_is_named_in_one_line() -> None:
    for overrides, words in (
        (["trainer.tensor_parallel=3"], "trainer.data_parallel=0: 1 x 4 GPUs"),
        (["trainer.data_parallel=3"], "1 nodes have 4 GPUs each for them, 4 in all (cluster.*); set it to 4"),
        (["rollout.engines=9"], "rollout.engines=9 makes 9 ranks, but 1 nodes have 4 GPUs each"),
        (["trainer.tensor_parallel=8", "cluster.nodes=2"], "does not divide the 4 ranks of its role on a node"),
        (["rollout.tensor_parallel=8", "cluster.nodes=2"], "rollout.tensor_parallel=8 does not divide the 4 ranks"),
        (["trainer.expert_parallel=3"], "needs 3 ranks for each copy of the experts"),
        (["cluster.engine_gpus_per_node=8"], "trainer.data_parallel=0: 1 x 0 GPUs"),
        (["cluster.engine_gpus_per_node=8", "trainer.data_parallel=1"], "must leave each role at least one GPU"),
        (["model.platform=cpu"], "cluster.gpus_per_node=8 with model.platform=cpu"),
        (["cluster.nics=[a]"], "cluster.nics has 1 entries for cluster.gpus_per_node=8"),
        (["cluster.numa_cores=[0-14]"], "its 4 workers at least one; name more cores"),
        (["cluster.numa_cores=['0-63','63-99']"], "cluster.numa_cores names core 63 twice"),
        (["cluster.numa_cores=[9-3]"], "cluster.numa_cores='9-3' is not a list of cores"),
        (["cluster.base_port=65530"], "cluster.base_port=65530 and the processes of a node need ports up to 65538"),
        ([*NO_GPUS, "cluster.nics=[a]"], "cluster.nics=['a'] has no effect with cluster.gpus_per_node=0"),
    ):
        assert words in refusal(lambda: place_processes(made(*EIGHT, *overrides))), overrides  # noqa: B023


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_configuration_for_a_cluster_fits_its_machines_and_cards_and_has_the_time_to_start(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, config, file = (ROOT / "docs" / "slurm.md").read_text(), parse_config(path), tmp_path / "placement.json"
    assert main(["placement", str(path), "--memory", "--json", str(file)]) == 0
    shown, written = capsys.readouterr().out, json.loads(file.read_text())
    assert "too much" not in shown
    assert "copies of the model" in shown
    assert "published" in path.parts or path.stem.endswith(f"_{config.cluster.nodes}node")
    processes = place_processes(config).processes
    used = Counter((process.node, gpu) for process in processes for gpu in process.devices)
    assert used == Counter(product(range(config.cluster.nodes), range(8)))
    assert [each["name"] for each in written["processes"]] == [process.name for process in processes]
    assert written["memory"]["engine"]["parameters"] > 0
    uses = written["memory"]["trainer"]
    most = max(sum(value for value in use.values() if isinstance(value, int)) for use in uses)
    name = path.relative_to(ROOT / "configs").with_suffix("")
    row = next(line for line in page.splitlines() if f"| `{name}` |" in line)
    assert f"| {most / 2**30:.1f}, " in row
    starts = [line for line in shown.splitlines() if line.startswith(("start: reads ", "checkpoint: writes "))]
    assert len(starts) == 2
    assert "is short" not in "".join(starts)
    assert written["start"]["resumed_bytes"] == 7 * written["start"]["new_bytes"]
    assert path.stem != "235b_a22b_32node" or "\n".join(starts) in page
    assert most < 80 * 2**30
    training = predict_training(config, find_model_config(config) or {}, Rates.of_card(CARDS["H100"]), EpisodeLengths())
    assert 0.03 < training.mfu < 0.55


def estimate(parameters: int, *overrides: str) -> tuple[StartEstimate, list[str]]:
    config = parse_config(None, list(overrides))
    found = StartEstimate.of_config(config, parameters)
    return found, found.lines(config)


def test_a_start_reads_the_weights_and_the_optimizer_if_resumed_and_a_short_timeout_is_named() -> None:
    bfloat16, lines = estimate(10**9, "model.dtype=bfloat16", "cluster.nodes=4")
    assert bfloat16 == StartEstimate(2 * 10**9, 14 * 10**9)  # weights; main weights and two moments, 4 bytes each
    assert lines[0].endswith("about 1 s at 2 GB/s; resumed 13 GiB, 7 s")
    assert estimate(10**9)[0] == StartEstimate(4 * 10**9, 12 * 10**9)
    # An evaluation reads a copy for each node and saves nothing.
    found, [line] = estimate(10**9, "evaluation.only=true", "cluster.nodes=4", "model.dtype=bfloat16")
    assert found == StartEstimate(8 * 10**9, 8 * 10**9)
    assert "resumed" not in line
    _, (_, save) = estimate(10**10, "model.dtype=bfloat16")
    assert save == "checkpoint: writes 130 GiB, about 70 s"
    _, (start, _) = estimate(10**11, "model.dtype=bfloat16")
    assert start.endswith("run.startup_timeout_seconds=600 is short, set it to 1700 or more")


def test_what_is_impossible_ends_with_two_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "configs" / "32b_4node.yaml")
    assert main(["placement", path, "cluster.nodes=2", "--memory"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("webrl: trainer, stage 0 needs 100.")
    assert "more than cluster.gpu_gib=80 (optimizer" in shown.err
    assert "too much" in shown.out
    assert main(["placement", path, "model.path=somewhere", "--memory"]) == 2
    assert "nor named as a released size is" in capsys.readouterr().err
    assert main(["placement", path, "--json", "/no/such/folder/file"]) == 2
    assert "--json=/no/such/folder/file: No such file or directory" in capsys.readouterr().err

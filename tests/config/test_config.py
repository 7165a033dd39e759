from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl import cli
from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.load import all_settings, parse_config, save_config
from megatron_webrl.config.schema import check_combinations
from megatron_webrl.launch.validation import load_config
from megatron_webrl.model.parameter_counts import config_sections, size_from_path
from megatron_webrl.placement.memory_estimate import image_buffer_mib
from tests.config.conftest import error, refusal

ROOT = Path(__file__).parents[2]


def test_overrides_replace_the_files_values_and_what_is_saved_reads_back_the_same(config_file: Path, tmp_path: Path):
    before = set(os.listdir("/dev/shm"))
    config = load_config(config_file, ["trainer.updates=7", "tasks.environments=[click-test,focus-text]"])
    assert config.trainer.updates == 7
    assert config.tasks.environments == ["click-test", "focus-text"]
    assert config.rollout.max_model_len == 1024
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config
    assert set(os.listdir("/dev/shm")) == before  # checking starts nothing


REFUSALS = {
    "trainer.tensor_parallel=3": "tensor_parallel=3 does not divide num_attention_heads=4",
    "model.path=''": "model.path is empty",
    "model.path=no/such/folder": "model.path=no/such/folder is not a folder",
    "ring.capacity_mib=100000000": "ring.capacity_mib=100000000 exceeds",
    "trainer.optimizer.learning_rate=-1e-3": "trainer.optimizer.learning_rate=-0.001 must be greater than 0",
    "trainer.optimizer.learning_rate=nan": "trainer.optimizer.learning_rate=nan must be greater than 0",
    "rollout.group_size=1": "rollout.group_size=1",
    "tasks.max_steps_by_difficulty={easy: 0}": "tasks.max_steps_by_difficulty.easy=0 must be at least 1",
    "trainer.updates=many": "trainer.updates: Value 'many'",
    "trainer.loss.normalizer=sum": "trainer.loss.normalizer='sum' is not one of",
    "rollout.max_new_tokens=1024": "rollout.max_new_tokens=1024",
    "rollout.max_model_len=5000": "max_position_embeddings",
    "trainer.tokens_per_microbatch=512": "trainer.tokens_per_microbatch=512",
    "trainer.profile_updates=[0]": "trainer.profile_updates=[0]: 0",
    "trainer.minibatches=9": "trainer.minibatches=9 exceeds trainer.groups_per_update=8",
    "trainer.loss.dual_clip=0.9": "trainer.loss.dual_clip=0.9",
    "rollout.context={policy: append, history_turns: 1}": "rollout.context.history_turns=1",
    "rollout.context={compact: true, web_advice: true}":
        "rollout.context.web_advice has no effect with rollout.context.compact=true",
    "rollout.context.carry_fields=false":
        "rollout.context.carry_fields has no effect with rollout.context.response_format=vanilla",
    "rollout.context={compact: true, response_format: progress}":
        "rollout.context.response_format=progress has no effect with rollout.context.compact=true",
    "tasks.environments=[]": "tasks.environments is empty",
    "tasks.sampler.target=1.5": "tasks.sampler.target=1.5 must be at most 1",
    "tasks.sampler.weights={click-test: 2}": "sampler.weights has no effect with tasks.sampler.name=uniform",
    "tasks.sampler.name=ratio": "tasks.sampler.name=ratio needs tasks.sampler.weights",
    "tasks.sampler={name: ratio, weights: {clik-test: 1}}": "'clik-test' is not one of tasks.environments",
    "tasks.sampler={name: ratio, weights: {click-test: 0}}": "tasks.sampler.weights is 0",
    "tasks.sampler={name: ratio, weights: {click-test: .nan}}": "tasks.sampler.weights.click-test=nan",
    "tasks.max_steps_by_difficulty={tough: 9}": "'tough' is not one of easy, medium, hard",
    "browser.executable=no-such-browser": "browser.executable=no-such-browser",
    "browser.actions=[hover,juggle]": "browser.actions=juggle is not one of hover, double_click",
    "browser.actions=[new_tab]": "browser.actions=new_tab has tabs but no switch_tab",
    "browser.servers=node7:8700": "'node7:8700' is not an address such as http://node7:8700 (browser.servers)",
    "browser.replay_ignore=[_]": "browser.replay_ignore has no effect with browser.replay",
    "browser={record: a, replay: b}": "browser.record=a and browser.replay=b",
    "run.name=a/b": "run.name='a/b'",
    "run.resume=true": "holds no complete checkpoint",
    "trainer": "is not of the form key=value",
    "trainer.pipeline_parallel=9": "= 9 exceeds the 4 layers",
    "trainer.context_parallel=4": "tensor_parallel x context_parallel=4 does not divide num_key_value_heads=2",
    "trainer.warm_start.demonstrations_file=x": "warm_start.demonstrations_file has no effect",
    "trainer.warm_start={demonstrations_file: x, demonstrations: 3}": "x is not a file",
    "evaluation.samples=4": "evaluation.samples=4 with evaluation.temperature=0",
    "evaluation.blank_images=true": "set evaluation.after=true",
    "evaluation.greedy=true": "evaluation.greedy=true",
    "model.head_dtype=float32": "model.head_dtype=float32 has no effect",
    "trainer.attention=flash": "trainer.attention=flash needs model.dtype=bfloat16, not float32",
    "trainer.data_parallel=0": "trainer.data_parallel=0 asks cluster.* for a number, but cluster.gpus_per_node=0",
    "cluster.nodes=2": "trainer.data_parallel=1 makes 1 ranks, which cluster.nodes=2 do not divide",
    "cluster.gpus_per_node=2": "cluster.engine_gpus_per_node=0 of cluster.gpus_per_node=2",
}  # fmt: skip
NEAREST = {
    "trainer.tensor_paralel": "trainer.tensor_parallel",
    "trianer": "trainer",
    "trainer.loss.normaliser": "trainer.loss.normalizer",
    "run.trainer_restarts": "run.max_trainer_restarts",
    "cluster.port": "cluster.base_port",
}


def test_a_broken_setting_is_named_in_one_line(config_file: Path, tiny_sparse_model: Path, tmp_path: Path):
    for override, words in REFUSALS.items():
        assert words in error(config_file, override), override
    sparse = f"model.path={tiny_sparse_model}"
    for override, words in {
        "trainer.expert_parallel=3": "expert_parallel=3 does not divide num_experts=4",
        "trainer.expert_tensor_parallel=5": "expert_tensor_parallel=5 does not divide moe_intermediate_size=96",
        "trainer.expert_parallel=2": "=2 does not divide tensor_parallel x context_parallel x data_parallel",
    }.items():
        assert words in error(config_file, sparse, override)
    assert load_config(config_file, [sparse, "trainer.pipeline_parallel=2"]).trainer_world_size == 2
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type='llama'" in error(config_file, f"model.path={tmp_path}")
    assert "is not a file" in error(tmp_path / "none.yaml")
    for name, text, words in (("bad", "run: {name: [", "bad.yaml is not valid YAML"), ("list", "- 1\n", "list.yaml")):
        (tmp_path / f"{name}.yaml").write_text(text)
        assert words in error(tmp_path / f"{name}.yaml")


def test_an_unknown_key_is_refused_with_the_nearest_name(config_file: Path):
    assert "did you mean" not in error(config_file, "no.such.key=1")
    valid = config_file.read_text()
    for key, nearest in NEAREST.items():
        words = f"{key} in {config_file} or an override; did you mean {nearest}?"
        assert words in error(config_file, f"{key}=1")
        config_file.write_text(f"{': {'.join(key.split('.'))}: 1{'}' * key.count('.')}\n")
        assert words in error(config_file)
        config_file.write_text(valid)


def test_settings_of_browser_servers_have_no_effect_here_and_are_refused(config_file: Path) -> None:
    servers = "browser.servers=http://node7:8700"
    sites = ["tasks.source=sites", "tasks.environments=[forms-vote]", servers]
    for setting in (
        "browser.processes=2", "browser.open_web=true", "browser.replay=.", "tasks.latency.median_seconds=0.5",
        "tasks.offline_websites=true",
    ):  # fmt: skip
        assert f"has no effect with {servers}" in error(config_file, *sites, setting), setting
    assert load_config(config_file, [servers, "browser.width=640"]).browser.servers == "http://node7:8700"


def test_settings_that_need_each_other_are_accepted_together(config_file: Path) -> None:
    length = "trainer.reward={length_penalty: 0.1, length_window: %d}"
    for overrides in (
        ["browser.replay=.", "browser.replay_ignore=[_]"],
        ["trainer.loss.name=raft", "trainer.loss.replay_versions=3", "rollout.group_size=1"],
        [length % 64, "trainer.loss.dual_clip=0"],
        ["model.head_dtype=float32", "model.dtype=bfloat16"],
        ["model.head_dtype=float32", "rollout.dtype=bfloat16"],
        ["model.head_dtype=float32", "model.dtype=bfloat16", "rollout.dtype=float32"],
        *([f"rollout.context={{compact: {c}, response_format: memory_compact}}"] for c in ("true", "false")),
    ):
        load_config(config_file, overrides)
    assert "length_window=65 exceeds rollout.max_new_tokens=64" in error(config_file, length % 65)
    words = error(config_file, "browser.marks=true", "trainer.warm_start.demonstrations=5")
    assert "set demonstrations to 0, or browser.marks=false" in words
    alone = ["evaluation.only=true", "model.dtype=bfloat16", "rollout.dtype=float32", "model.head_dtype=float32"]
    assert "model.head_dtype=float32 has no effect" in refusal(check_combinations, parse_config(config_file, alone))


def test_the_image_buffer_holds_the_largest_screenshot_of_a_prompt(config_file: Path) -> None:
    assert image_buffer_mib(load_config(config_file, ["trainer.image_workers=0"]), 16, 2) == 0
    config = load_config(config_file)
    assert image_buffer_mib(config, 16, 2) == 512
    config.rollout.max_model_len = 262144
    assert image_buffer_mib(config, 16, 2) == 1536


def test_the_mode_sets_the_staleness_and_another_one_is_refused(config_file: Path) -> None:
    for mode, staleness in (("async", 2), ("one_step_off", 1), ("sync", 0)):
        own = f"rollout.mode={mode}"
        for overrides in ([own], [own, f"rollout.max_staleness={staleness}"]):
            assert load_config(config_file, overrides).staleness_limit == staleness
        if mode != "async":
            assert "rollout.stale has no effect" in error(config_file, own, "rollout.stale=mask")
            message = error(config_file, own, "rollout.max_staleness=3")
            assert f"rollout.max_staleness=3 has no meaning with {own}" in message


def test_every_configuration_in_the_repository_is_valid(tiny_model: Path, tmp_path: Path):
    # Of a released model the shapes are here, of the packages for GPUs nothing; the tests may run as root.
    here = [f"model.path={tmp_path}", "trainer.layers=local", "trainer.attention=sdpa", "ring.capacity_mib=64"]
    for path in sorted({*(ROOT / "configs").rglob("*.yaml")} - {*(ROOT / "configs" / "eval").iterdir()}):
        size = size_from_path(parse_config(path).model.path)
        if size is None:
            assert load_config(path, [f"model.path={tiny_model}"]).model.path == str(tiny_model)
            continue
        (tmp_path / "config.json").write_text(json.dumps(config_sections(size)))
        loaded = load_config(path, [*here, "browser.user=nobody"])
        assert loaded.cluster != ClusterConfig(), path
        # what the model has noted is in later prompts
        assert loaded.rollout.context.response_format.startswith("memory_"), path


@pytest.mark.parametrize("name", ["quickstart", "miniwob"])
def test_a_kept_model_has_the_tokenizer_of_the_tiny_model(name: str, tiny_model: Path):
    kept = ROOT / "models" / name
    load_config(ROOT / "configs" / f"{name}.yaml", [f"model.path={kept}"])
    assert (kept / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()


def test_mlflow_goes_where_the_setting_or_the_environment_says(config_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert load_config(config_file, ["run.directory=/some/runs"]).tracking_uri == "sqlite:////some/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert load_config(config_file).tracking_uri == "http://tracking:5000"
    assert load_config(config_file, ["tracking.uri=http://other:5000"]).tracking_uri == "http://other:5000"


def test_the_rows_of_the_webgym_page_name_settings_that_exist():
    lines = [line for line in (ROOT / "docs" / "webgym.md").read_text().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) > 50
    assert all(here and (here != "none" or remarks) for _, here, remarks in rows)
    keys = all_settings()
    known = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2)}
    named = {span for _, here, remarks in rows for span in re.findall(r"`([a-z_0-9.*]+)[=`]", here + remarks)}
    settings = {each for each in named if each.split(".")[0] in known and "." in each}
    assert len(settings) > 50
    assert not {each for each in settings if not any(re.fullmatch(each.replace("*", "[a-z_]+"), key) for key in known)}


# -- resumes ---------------------------------------------------------------------------------------


def write_checkpoint(run_folder: Path, **state: Any) -> Path:
    """The newest checkpoint of a run, without tensors."""
    checkpoint = run_folder / "checkpoints" / "version-000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    (checkpoint / "state.json").write_text(json.dumps(state))
    return checkpoint


def test_a_resume_from_a_checkpoint_that_does_not_fit_is_refused(config_file: Path, tmp_path: Path) -> None:
    run = ["run.resume=true", f"run.directory={tmp_path}"]
    sizes = {"ranks": 2, "tensor": 2, "pipeline": 1, "virtual_pipeline": 1, "context": 1, "expert": 1}
    layout = sizes | {"expert_tensor": 1}
    write_checkpoint(tmp_path / "run", layout=layout, optimizer_shards="ranks", has_critic=False)
    assert "optimizer_shards=ranks and tensor size 2, not 1: resume with the same sizes" in error(config_file, *run)
    assert load_config(config_file, [*run, "trainer.tensor_parallel=2", "trainer.data_parallel=3"]).run.resume
    write_checkpoint(tmp_path / "run", layout=layout, optimizer_shards="whole", has_critic=True)
    assert "has a critic, but trainer.advantage.name=group; a run has" in error(config_file, *run)
    checkpoint = write_checkpoint(tmp_path / "run", layout=layout, optimizer_shards="whole", has_critic=False)
    assert load_config(config_file, run).run.resume
    description = json.loads((Path(load_config(config_file).model.path) / "config.json").read_text())
    description["text_config"]["hidden_size"] *= 2
    (checkpoint / "hf").mkdir()
    (checkpoint / "hf" / "config.json").write_text(json.dumps(description))
    assert "version-000001 has text_config.hidden_size=" in error(config_file, *run)
    shutil.rmtree(checkpoint)
    assert "checkpoints/latest names, holds no state.json; write the name of a complete" in error(config_file, *run)
    assert cli.main(["train", str(config_file), *run]) == 2


def test_a_resume_needs_initial_weights_only_as_a_reference(config_file: Path, tmp_path: Path) -> None:
    penalty = "trainer.loss.kl_coefficient=0.1"
    run = ["run.resume=true", f"run.directory={tmp_path}"]
    write_checkpoint(tmp_path / "run")
    deleted, missing = [*run, "model.checkpoint=/deleted"], "model.checkpoint=/deleted holds no Megatron"
    assert load_config(config_file, deleted).run.resume
    assert missing in error(config_file, *deleted, penalty)
    assert missing in error(config_file, *deleted, "run.resume=false")
    warm = [*run, "trainer.warm_start.demonstrations=5"]
    assert load_config(config_file, warm).run.resume
    assert "a run stores them only if it begins with the penalty" in error(config_file, *warm, penalty)
    (tmp_path / "run" / "reference" / "megatron").mkdir(parents=True)
    (tmp_path / "run" / "reference" / "megatron" / "metadata.json").touch()
    assert load_config(config_file, [*warm, penalty]).trainer.loss.kl_coefficient == 0.1

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.load import all_settings, parse_config, save_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.validation import load_config
from megatron_webrl.model.parameter_counts import config_sections, size_from_path
from megatron_webrl.placement.memory_estimate import image_buffer_mib
from tests.config.conftest import error
from tools.documentation.configuration_page import page

ROOT = Path(__file__).parents[2]


def test_overrides_replace_the_files_values(config_file: Path):
    config = load_config(config_file, ["trainer.updates=7", "tasks.environments=[click-test,focus-text]"])
    assert config.trainer.updates == 7
    assert config.tasks.environments == ["click-test", "focus-text"]
    assert config.rollout.max_model_len == 1024


def test_a_saved_configuration_reads_back_the_same(config_file: Path, tmp_path: Path):
    config = load_config(config_file, ["trainer.loss.normalizer_constant=4"])
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.tensor_paralel=2", "unknown setting trainer.tensor_paralel"),
        (
            "trainer.tensor_parallel=3",
            "tensor_parallel=3 does not divide num_attention_heads=4 (trainer.tensor",
        ),
        ("trainer.tensor_parallel=4", "does not divide num_key_value_heads=2"),
        ("model.path=no/such/folder", "model.path=no/such/folder is not a folder"),
        ("model.path=''", "model.path is empty"),
        ("ring.capacity_mib=100000000", "ring.capacity_mib=100000000 exceeds the"),
        ("trainer.optimizer.learning_rate=-1e-3", "trainer.optimizer.learning_rate=-0.001 must be greater than 0"),
        ("trainer.optimizer.learning_rate=nan", "trainer.optimizer.learning_rate=nan must be greater than 0"),
        ("trainer.updates=many", "trainer.updates: Value 'many'"),
        ("trainer.loss.normalizer=sum", "trainer.loss.normalizer='sum' is not one of"),
        ("rollout.max_new_tokens=1024", "leaves no room for a prompt"),
        ("rollout.max_model_len=5000", "max_position_embeddings"),
        ("trainer.tokens_per_microbatch=512", "trainer.tokens_per_microbatch=512 cannot hold"),
        ("rollout.group_size=1", "gives no baseline"),
        ("trainer.profile_updates=[0]", "trainer.profile_updates=[0]: 0 is not between 1 and 5"),
        (
            "trainer.minibatches=9",
            "trainer.minibatches=9 exceeds trainer.groups_per_update=8, and groups stay whole; lower it",
        ),
        ("trainer.loss.dual_clip=0.9", "trainer.loss.dual_clip=0.9 would clip the ratio 1 itself"),
        (
            "trainer={loss: {name: raft}, reward: {format_penalty: 0.1}}",
            "trainer.reward.format_penalty=0.1 has no effect with trainer.loss.name=raft",
        ),
        (
            "trainer={loss: {name: raft}, zero_variance_groups: keep}",
            "trainer.zero_variance_groups=keep has no effect with trainer.loss.name=raft",
        ),
        (
            "trainer.loss={decoupled: false, importance_weight_cap: 2}",
            "trainer.loss.importance_weight_cap has no effect with trainer.loss.decoupled=false",
        ),
        ("rollout.context.policy=growing", "rollout.context.policy='growing' is not one of sliding, append"),
        (
            "rollout.context={policy: append, history_turns: 1}",
            "rollout.context.history_turns=1 leaves no room to append to",
        ),
        (
            "rollout.context={compact: true, response_format: progress}",
            "rollout.context.response_format=progress has no effect with rollout.context.compact=true",
        ),
        ("tasks.environments=[]", "tasks.environments is empty"),
        ("tasks.sampler.name=random", "tasks.sampler.name='random' is not one of uniform, ratio, curriculum"),
        ("tasks.sampler.target=1.5", "tasks.sampler.target=1.5 must be at most 1"),
        ("tasks.sampler.target=-0.1", "tasks.sampler.target=-0.1 must be at least 0"),
        (
            "tasks.sampler.weights={click-test: 2}",
            "sampler.weights has no effect with tasks.sampler.name=uniform",
        ),
        ("tasks.sampler.name=ratio", "tasks.sampler.name=ratio needs tasks.sampler.weights"),
        ("tasks.max_steps_by_difficulty={easy: 0}", "tasks.max_steps_by_difficulty.easy=0 must be at least 1"),
        ("tasks.max_steps_by_difficulty={tough: 9}", "'tough' is not one of easy, medium, hard"),
        ("tasks.evaluation_max_steps_by_difficulty={medum: 9}", "is not one of easy, medium, hard; near: medium"),
        ("browser.executable=no-such-browser", "browser.executable=no-such-browser"),
        ("browser.actions=[hover,juggle]", "browser.actions=juggle is not one of hover, double_click"),
        ("browser.actions=[new_tab]", "browser.actions=new_tab has tabs but no switch_tab; add it"),
        ("browser.servers=node7:8700", "'node7:8700' is not an address such as http://node7:8700 (browser.servers)"),
        ("browser.processes=0", "browser.processes=0 must be at least 1"),
        ("run.name=a/b", "run.name='a/b'"),
        ("run.resume=true", "holds no complete checkpoint"),
        ("trainer", "is not of the form key=value"),
        ("trainer.pipeline_parallel=9", "= 9 exceeds the 4 layers"),
        ("trainer.virtual_pipeline=2", "needs trainer.pipeline_parallel of at least 2"),
        ("trainer.context_parallel=4", "tensor_parallel x context_parallel=4 does not divide num_key_value_heads=2"),
        ("trainer.expert_parallel=2", "is dense; set both to 1"),
        ("trainer.layers=transformer_engine", "needs the package transformer_engine, which is not installed here"),
        ("evaluation.samples=4", "evaluation.samples=4 with evaluation.temperature=0 repeats the same episode"),
        ("evaluation.blank_images=true", "set evaluation.after=true as well"),
        ("evaluation.greedy=true", "evaluation.greedy=true repeats evaluations before and after training"),
        ("evaluation.skip=-1", "evaluation.skip=-1 must be at least 0"),
        ("evaluation.temperature=-1", "evaluation.temperature=-1.0 must be at least 0"),
        ("trainer.attention=flash", "trainer.attention=flash needs model.dtype=bfloat16, not float32"),
        ("trainer.attention=varlen", "trainer.attention=varlen needs model.dtype=bfloat16, not float32; set it, or "),
        ("trainer.data_parallel=0", "trainer.data_parallel=0 asks cluster.* for a number, but cluster.gpus_per_node=0"),
        ("rollout.engines=-1", "rollout.engines=-1 must be at least 0"),
        ("cluster.nodes=2", "trainer.data_parallel=1 makes 1 ranks, which cluster.nodes=2 do not divide"),
        (
            "cluster.gpus_per_node=2",
            "cluster.engine_gpus_per_node=0 of cluster.gpus_per_node=2 must leave each role at least one GPU",
        ),
    ],
)
def test_a_broken_setting_is_named_in_one_line(config_file: Path, override: str, words: str):
    assert words in error(config_file, override)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainer.tensor_paralel", "trainer.tensor_parallel"),
        ("rollout.group_sze", "rollout.group_size"),
        ("trianer", "trainer"),
        ("trainer.loss.normaliser", "trainer.loss.normalizer"),
        ("run.start_timeout_seconds", "run.startup_timeout_seconds"),
        ("run.trainer_restarts", "run.max_trainer_restarts"),
        ("ring.mib", "ring.capacity_mib"),
        ("browser.keep_pages", "browser.reuse_pages"),
        ("cluster.port", "cluster.base_port"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(config_file: Path, key: str, nearest: str):
    message = error(config_file, f"{key}=1")
    assert message.endswith(f"an override; did you mean {nearest}? docs/configuration.md lists all settings")
    config_file.write_text(f"{': {'.join(key.split('.'))}: 1{'}' * key.count('.')}\n")
    assert f"{key} in {config_file} or an override; did you mean {nearest}?" in error(config_file)


def test_an_unknown_key_that_resembles_no_setting_is_refused_without_a_suggestion(config_file: Path):
    assert error(config_file, "no.such.key=1").endswith("an override; docs/configuration.md lists all settings")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.expert_parallel=3"], "expert_parallel=3 does not divide num_experts=4 (trainer.expert_parallel)"),
        (["trainer.expert_tensor_parallel=5"], "expert_tensor_parallel=5 does not divide moe_intermediate_size=96"),
        (["trainer.expert_parallel=2"], "=2 does not divide tensor_parallel x context_parallel x data_parallel"),
    ],
)
def test_what_does_not_fit_a_mixture_of_experts_is_named(
    config_file: Path, tiny_sparse_model: Path, overrides: list[str], words: str
) -> None:
    assert words in error(config_file, f"model.path={tiny_sparse_model}", *overrides)
    assert (
        load_config(config_file, [f"model.path={tiny_sparse_model}", "trainer.pipeline_parallel=2"]).trainer_world_size
        == 2
    )


@pytest.mark.parametrize(
    "setting",
    [
        "browser.processes=2",
        "browser.open_web=true",
        "browser.replay=.",
        "tasks.latency.median_seconds=0.5",
        "tasks.offline_websites=true",
    ],
)
def test_settings_of_browser_servers_have_no_effect_here_and_are_refused(config_file: Path, setting: str) -> None:
    servers = "browser.servers=http://node7:8700"
    with pytest.raises(ConfigError, match=r"has no effect with browser.servers=http://node7:8700"):
        load_config(config_file, ["tasks.source=sites", "tasks.environments=[forms-vote]", servers, setting])
    assert load_config(config_file, [servers, "browser.width=640"]).browser.servers == "http://node7:8700"


def test_recording_and_replay_exclude_each_other(config_file: Path) -> None:
    assert "browser.record=a and browser.replay=b are both set" in error(
        config_file, "browser.record=a", "browser.replay=b"
    )
    assert "browser.replay_ignore has no effect with browser.replay" in error(config_file, "browser.replay_ignore=[_]")
    assert load_config(config_file, ["browser.replay=.", "browser.replay_ignore=[_]"]).browser.replay_ignore == ["_"]


def test_the_image_buffer_holds_the_largest_screenshot_of_a_prompt(config_file: Path) -> None:
    assert image_buffer_mib(load_config(config_file, ["trainer.image_workers=0"]), 16, 2) == 0
    config = load_config(config_file)
    assert image_buffer_mib(config, 16, 2) == 512
    config.rollout.max_model_len = 262144
    assert image_buffer_mib(config, 16, 2) == 1536


def test_settings_of_another_loss_and_penalties_out_of_reach_are_refused(config_file: Path) -> None:
    raft = "trainer.loss.name=raft"
    overrides = [raft, "trainer.loss.replay_versions=3", "rollout.group_size=1"]
    assert load_config(config_file, overrides).trainer.loss.replay_versions == 3
    length = ["trainer.reward.length_penalty=0.1", "trainer.reward.length_window=65"]
    assert "length_window=65 exceeds rollout.max_new_tokens=64" in error(config_file, *length)
    assert load_config(config_file, [length[0], "trainer.reward.length_window=64", "trainer.loss.dual_clip=0"])


def test_a_file_of_demonstrations_must_be_there_and_be_used(config_file: Path, tmp_path: Path) -> None:
    file = f"trainer.warm_start.demonstrations_file={tmp_path / 'absent'}"
    assert "warm_start.demonstrations_file has no effect" in error(config_file, file)
    assert "is not a file; write one with `webrl demonstrate`" in error(
        config_file, file, "trainer.warm_start.demonstrations=3"
    )


def test_the_compact_memory_form_is_accepted_with_a_compact_prompt_and_without(config_file: Path) -> None:
    for compact in ("true", "false"):
        context = f"rollout.context={{compact: {compact}, response_format: memory_compact}}"
        assert load_config(config_file, [context]).rollout.context.response_format == "memory_compact"


@pytest.mark.parametrize(("mode", "staleness"), [("async", 2), ("one_step_off", 1), ("sync", 0)])
def test_the_mode_sets_the_staleness_and_another_one_is_refused(config_file: Path, mode: str, staleness: int) -> None:
    assert load_config(config_file, [f"rollout.mode={mode}"]).staleness_limit == staleness
    assert (
        load_config(config_file, [f"rollout.mode={mode}", f"rollout.max_staleness={staleness}"]).staleness_limit
        == staleness
    )
    if mode != "async":
        message = error(config_file, f"rollout.mode={mode}", "rollout.max_staleness=3")
        assert f"rollout.max_staleness=3 has no meaning with rollout.mode={mode}" in message


def test_scripts_cannot_demonstrate_by_numbered_elements(config_file: Path) -> None:
    words = error(config_file, "browser.marks=true", "trainer.warm_start.demonstrations=5")
    assert "scripts act by coordinates; set demonstrations to 0, or browser.marks=false" in words


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["weights={clik-test: 1}"], "'clik-test' is not one of tasks.environments, or difficulties; near: click-test"),
        (["weights={click-test: 0}"], "tasks.sampler.weights is 0 for every one of tasks.environments; raise one"),
        (["weights={click-test: -1}"], "tasks.sampler.weights.click-test=-1.0 must be a number of at least 0"),
        (["weights={click-test: .nan}"], "tasks.sampler.weights.click-test=nan must be a number of at least 0"),
        (["weights={easy: 1, click-test: 1}"], "weights: 'easy' is not one of tasks.environments, or difficulties"),
    ],
)
def test_ratios_that_cannot_be_drawn_by_are_named(config_file: Path, overrides: list[str], words: str) -> None:
    assert words in error(config_file, "tasks.sampler.name=ratio", *(f"tasks.sampler.{each}" for each in overrides))


def test_a_broken_file_is_named(tmp_path: Path):
    assert "is not a file" in error(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("run: {name: [")
    assert "bad.yaml is not valid YAML" in error(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    assert "list.yaml" in error(tmp_path / "list.yaml")


def test_a_folder_of_another_model_is_refused(config_file: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type='llama'" in error(config_file, f"model.path={tmp_path}")


def test_every_setting_has_a_meaning_and_the_page_lists_it():
    text = page()
    assert all(f"`{key}`" in text for key in all_settings())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_configuration_in_the_repository_is_valid(path: Path, tiny_model: Path, tmp_path: Path):
    size = size_from_path(parse_config(path).model.path)
    if size is None:
        assert load_config(path, [f"model.path={tiny_model}"]).model.path == str(tiny_model)
        return
    # Of a released model the shapes are here, of the packages for GPUs nothing.
    (tmp_path / "config.json").write_text(json.dumps(config_sections(size)))
    here = [f"model.path={tmp_path}", "trainer.layers=local", "trainer.attention=sdpa", "ring.capacity_mib=64"]
    here.append("browser.user=nobody")  # the tests may run as root
    loaded = load_config(path, here)
    assert loaded.cluster != ClusterConfig()
    assert loaded.rollout.context.response_format.startswith("memory_")  # what the model has noted is in later prompts


def test_the_kept_model_has_the_tokenizer_of_the_tiny_model(tiny_model: Path):
    kept = Path(
        load_config(ROOT / "configs" / "quickstart.yaml", [f"model.path={ROOT / 'models' / 'quickstart'}"]).model.path
    )
    assert (kept / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()


def test_mlflow_goes_where_the_setting_or_the_environment_says(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert load_config(config_file, ["run.directory=/some/runs"]).tracking_uri == "sqlite:////some/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert load_config(config_file).tracking_uri == "http://tracking:5000"
    assert load_config(config_file, ["tracking.uri=http://other:5000"]).tracking_uri == "http://other:5000"


def test_checking_starts_nothing(config_file: Path):
    before = set(os.listdir("/dev/shm"))
    load_config(config_file)
    assert set(os.listdir("/dev/shm")) == before

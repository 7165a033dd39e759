from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_webrl.config import Config, ConfigError, flat, load, save
from tools.write_configuration_page import page

ROOT = Path(__file__).parent.parent


@pytest.fixture
def config_file(tmp_path: Path, tiny_model: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {tiny_model}}}\nrollout: {{max_model_len: 1024, max_new_tokens: 64}}\nring: {{mib: 64}}\n"
    )
    return path


def error(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_overrides_replace_the_files_values(config_file: Path):
    config = load(config_file, ["trainer.updates=7", "tasks.environments=[click-test,focus-text]"])
    assert config.trainer.updates == 7
    assert config.tasks.environments == ["click-test", "focus-text"]
    assert config.rollout.max_model_len == 1024


def test_a_saved_configuration_reads_back_the_same(config_file: Path, tmp_path: Path):
    config = load(config_file, ["trainer.loss.k=4"])
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.tensor_paralel=2", "unknown key trainer.tensor_paralel"),
        ("trainer.tensor_parallel=3", "trainer.tensor_parallel=3 does not divide num_attention_heads=4"),
        ("trainer.tensor_parallel=4", "does not divide num_key_value_heads=2"),
        ("model.path=no/such/folder", "model.path=no/such/folder is not a folder"),
        ("model.path=''", "model.path is empty"),
        ("ring.mib=100000000", "ring.mib=100000000 exceeds the"),
        ("trainer.optimizer.learning_rate=-1e-3", "trainer.optimizer.learning_rate=-0.001 must be greater than 0"),
        ("trainer.optimizer.learning_rate=nan", "trainer.optimizer.learning_rate=nan must be greater than 0"),
        ("trainer.updates=many", "trainer.updates: Value 'many'"),
        ("trainer.loss.normaliser=sum", "trainer.loss.normaliser='sum' is not one of"),
        ("rollout.max_new_tokens=1024", "leaves no room for a prompt"),
        ("rollout.max_model_len=5000", "max_position_embeddings"),
        ("trainer.tokens_per_microbatch=512", "trainer.tokens_per_microbatch=512 cannot hold"),
        ("rollout.group_size=1", "gives no baseline"),
        ("tasks.environments=[]", "tasks.environments is empty"),
        ("browser.executable=no-such-browser", "browser.executable=no-such-browser"),
        ("browser.actions=[hover,juggle]", "browser.actions=juggle is not one of hover, double_click"),
        ("browser.actions=[new_tab]", "browser.actions=new_tab has tabs but no switch_tab; add it"),
        ("browser.farm=node7:8700", "'node7:8700' is not an address such as http://node7:8700 (browser.farm)"),
        ("browser.processes=0", "browser.processes=0 must be at least 1"),
        ("run.name=a/b", "run.name='a/b'"),
        ("run.resume=true", "holds no complete checkpoint"),
        ("trainer", "is not of the form key=value"),
        ("trainer.pipeline_parallel=9", "= 9 exceeds the 4 layers"),
        ("trainer.virtual_pipeline=2", "needs trainer.pipeline_parallel of at least 2"),
        ("trainer.context_parallel=4", "tensor_parallel x context_parallel=4 does not divide num_key_value_heads=2"),
        ("trainer.expert_parallel=2", "is dense; set both to 1"),
        ("trainer.layers=transformer_engine", "needs the package transformer_engine, which is not installed here"),
        ("trainer.attention=flash", "needs the package flash_attn, which is not installed here"),
    ],
)
def test_a_broken_setting_is_named_in_one_line(config_file: Path, override: str, words: str):
    assert words in error(config_file, override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.expert_parallel=3"], "trainer.expert_parallel=3 does not divide num_experts=4"),
        (["trainer.expert_tensor_parallel=5"], "expert_tensor_parallel=5 does not divide moe_intermediate_size=96"),
        (["trainer.expert_parallel=2"], "= 2 does not divide trainer.tensor_parallel x context_parallel"),
        (["trainer.tensor_parallel=2", "trainer.sequence_parallel=false"], "set it to true"),
    ],
)
def test_what_does_not_fit_a_mixture_of_experts_is_named(
    config_file: Path, tiny_sparse_model: Path, overrides: list[str], words: str
) -> None:
    assert words in error(config_file, f"model.path={tiny_sparse_model}", *overrides)
    assert load(config_file, [f"model.path={tiny_sparse_model}", "trainer.pipeline_parallel=2"]).trainer_ranks == 2


@pytest.mark.parametrize("setting", ["browser.processes=2", "browser.open_web=true", "tasks.latency.median=0.5"])
def test_settings_of_a_farms_nodes_have_no_effect_here_and_are_refused(config_file: Path, setting: str) -> None:
    farm = "browser.farm=http://node7:8700"
    with pytest.raises(ConfigError, match=r"has no effect with browser.farm=http://node7:8700"):
        load(config_file, ["tasks.source=sites", "tasks.environments=[forms-vote]", farm, setting])
    assert load(config_file, [farm, "browser.width=640"]).browser.farm == "http://node7:8700"


def test_scripts_cannot_demonstrate_by_numbered_elements(config_file: Path) -> None:
    words = error(config_file, "browser.marks=true", "trainer.warm_start.demonstrations=5")
    assert "scripts act by coordinates; set demonstrations to 0, or browser.marks=false" in words


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
    assert all(f"`{key}`" in text for key in flat(Config()))
    assert (ROOT / "docs" / "configuration.md").read_text() == text


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_configuration_in_the_repository_is_valid(path: Path, tiny_model: Path):
    assert load(path, [f"model.path={tiny_model}"]).model.path == str(tiny_model)


def test_mlflow_goes_where_the_setting_or_the_environment_says(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert load(config_file, ["run.directory=/some/runs"]).tracking_uri == "sqlite:////some/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert load(config_file).tracking_uri == "http://tracking:5000"
    assert load(config_file, ["tracking.uri=http://other:5000"]).tracking_uri == "http://other:5000"


def test_checking_starts_nothing(config_file: Path):
    before = set(os.listdir("/dev/shm"))
    load(config_file)
    assert set(os.listdir("/dev/shm")) == before

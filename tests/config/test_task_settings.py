"""Settings of task files, in a whole configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_webrl import cli
from megatron_webrl.launch.evaluation import EvaluatedCheckpoint, parse_evaluation_config
from megatron_webrl.launch.validation import load_config
from megatron_webrl.tasks.files.table import task_file_digests
from tests.tasks.files.webgym_rows import webgym_row, write_rows

pytestmark = pytest.mark.usefixtures("not_root")  # pages of the open web


@pytest.fixture
def config_file(tmp_path: Path, tiny_model: Path) -> Path:
    training = write_rows(tmp_path / "train.jsonl", [webgym_row(number) for number in range(20)])
    test = write_rows(tmp_path / "test.jsonl", [webgym_row(number) for number in range(20, 25)])
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {tiny_model}}}\nrollout: {{max_model_len: 1024, max_new_tokens: 64}}\n"
        f"ring: {{capacity_mib: 64}}\nbrowser: {{open_web: true}}\nevaluation: {{after: true, episodes: 0}}\n"
        f"tasks: {{source: webgym, train_file: {training}, test_file: {test}}}\n"
    )
    return path


def test_a_configuration_with_task_files_passes_and_settings_may_follow_an_option(
    config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["train", str(config_file), "--check", "run.name=after"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert f"train_file: {tmp_path / 'train.jsonl'}" in shown
    assert "name: after" in shown
    for wrong in (["--chek", "run.name=a"], ["--check", "run.name=a", "-x"]):
        with pytest.raises(SystemExit):
            cli.main(["train", str(config_file), *wrong])
        assert "unrecognized arguments: " in capsys.readouterr().err


def test_bad_combinations_are_refused(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = "judge={evaluators: [judge], verdict: {name: m%s}}"
    for overrides, message in (
        (["browser.open_web=false"],
         "tasks.source=webgym has tasks on site0.example.com, but browser.open_web=false"),
        ([f"tasks.test_file={tmp_path / 'train.jsonl'}"], "share 20 websites: site0.example.com, "),
        (["tasks.train_file=nothing.jsonl"], "tasks.train_file=nothing.jsonl is neither a file nor a folder"),
        (["tasks.fields={domain: area}"], "20 of 20 rows do not fit"),
        (["tasks.fields={aim: goal}"], "tasks.fields: 'aim' is not one of id, instruction, "),
        (["trainer.warm_start.demonstrations=4"], "trainer.warm_start.demonstrations=4, but tasks.source=webgym"),
        (["tasks.train_file=''"], "tasks.source=webgym needs tasks.train_file for training"),
        (["tasks.test_file=''"], "tasks.source=webgym needs tasks.test_file for evaluations"),
        (["tasks.train_file=''", "tasks.test_file=''"], "needs tasks.train_file, tasks.test_file or both"),
        (["tasks.environments=[click-dialog]"], "is a setting of tasks.source=miniwob, tasks.source=sites"),
        (["tasks.source=miniwob"], "which tasks.source=miniwob has not; set it to at least 1"),
        (["tasks.source=miniwob", "evaluation.episodes=3", "tasks.fields={id: key}"],
         " is a setting of tasks.source=webgym, tasks.source=online_mind2web, "),
        (["tasks.source=own:Source"], "tasks.source=own:Source: own cannot be imported: ModuleNotFoundError"),
        (["tasks.growing_steps={interval: 10, cap_step: 5}"], "tasks.growing_steps.cap_step=5 is below "),
        (["tasks.growing_steps={interval: 10, initial: 40}"], "tasks.growing_steps.max=30 is below "),
        ([judge % ""], "judge.verdict.url is empty"),
        ([judge % ", url: host/v1"], "judge.verdict.url=host/v1"),
        ([judge % ", url: 'http://h/v1', key_variable: NO_SUCH_KEY"], "NO_SUCH_KEY is not set (judge.*.key_variable)"),
        (["judge.evaluators=[own:function]"], "judge.evaluators=own:function: own cannot be imported: Modu"),
    ):  # fmt: skip
        assert cli.main(["train", str(config_file), *overrides, "--check"]) == 2
        error = capsys.readouterr().err
        assert message in error, overrides
        assert error.count("\n") == 1 or "do not fit" in error
    load_config(config_file, ["tasks.source=miniwob", "evaluation.episodes=3"])


def test_offline_websites_need_their_own_setting(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, first in (("train", 0), ("test", 5)):
        rows = [webgym_row(number, website=f"shop-{number}.localhost") for number in range(first, first + 5)]
        write_rows(tmp_path / f"{name}.jsonl", rows)

    def check(*overrides: str) -> int:
        offline = ("browser.open_web=false", "tasks.offline_websites=true")
        return cli.main(["train", str(config_file), *offline, *overrides, "--check"])

    for overrides in ([], ["tasks.latency.median_seconds=0.1"], ["trainer.warm_start.demonstrations=3"]):
        assert check(*overrides) == 0
    assert check("tasks.offline_websites=false") == 2
    assert capsys.readouterr().err.endswith(".localhost; set tasks.offline_websites=true\n")
    write_rows(tmp_path / "test.jsonl", [webgym_row(7, website="other-7.localhost")])
    assert check() == 2
    assert "has tasks on other-7.localhost, which is no offline website\n" in capsys.readouterr().err


def test_a_run_is_resumed_with_its_training_file(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> int:
        run = (f"run.directory={tmp_path / 'runs'}", "run.resume=true")
        return cli.main(["train", str(config_file), *run, "--check"])

    config = load_config(config_file)
    folder = tmp_path / "runs" / "run" / "checkpoints"
    (folder / "version-000001").mkdir(parents=True)
    (folder / "latest").write_text("version-000001")
    for saved in (None, {"files": task_file_digests(config.tasks)}):
        (folder / "version-000001" / "state.json").write_text(json.dumps({"task_sampler": saved}))
        assert check() == 0, capsys.readouterr().err
    write_rows(tmp_path / "train.jsonl", [webgym_row(number) for number in range(19)])
    assert check() == 2
    assert "webrl: tasks.train_file=" in (error := capsys.readouterr().err)
    assert error.endswith("start a new run with another run.name and the weights of this one (model.checkpoint)\n")


def test_an_evaluation_reads_no_training_file(config_file: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").unlink()
    config = parse_evaluation_config(
        EvaluatedCheckpoint.resolve(tiny_model), [str(config_file), "evaluation.episodes=9"]
    )
    assert (config.tasks.train_file, Path(config.tasks.test_file).name) == ("", "test.jsonl")

import logging
import subprocess
import sys

import pytest

from megatron_webrl.util.text import RedactingFormatter, declare_secret, first_line, redact

UNCAUGHT = """
import threading
from megatron_webrl.util.text import configure_logging
configure_logging("test")
thread = threading.Thread(target=lambda: int("of a thread: canary-token"))
thread.start()
thread.join()
raise ValueError("of the program: canary-token")
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SOME_API_KEY", "sk-canary/+=1"), ("HF_TOKEN", "hf_canary"), ("MLFLOW_TRACKING_PASSWORD", "canary password"),
        ("AWS_ACCESS_KEY_ID", "AKIACANARY"), ("AWS_SECRET_ACCESS_KEY", "/canary/secret"),
    ],
)  # fmt: skip
def test_values_of_secret_variables_are_removed_from_texts(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    assert redact(f"sent {value} twice: {value}.") == "sent *** twice: ***."
    escaped = value.replace("/", "\\/")  # as some encoders of JSON write it
    assert redact(f"before {escaped}").replace("\\", "") == "before ***"
    assert first_line(RuntimeError(f"refused {value}\nmore")) == "refused ***"


def test_users_and_passwords_of_addresses_are_removed_and_other_text_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://someone:can%40ary-pass@proxy:3128")
    assert redact("through http://someone:can%40ary-pass@proxy:3128/") == "through http://***@proxy:3128/"
    assert redact("the password 'can@ary-pass' is wrong") == "the password '***' is wrong"
    assert redact("postgresql+psycopg2://u:p@db/mlflow") == "postgresql+psycopg2://***@db/mlflow"
    for text in ("https://medium.com/@someone", "someone@example.org", "sqlite:////a/b@c.db", "tokens 5, key 7"):
        assert redact(text) == text


def test_paths_short_values_and_other_variables_are_no_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_KEY", sys.executable)
    monkeypatch.setenv("LOCAL_API_KEY", "none")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsefalse")
    text = f"{sys.executable} none falsefalse"
    assert redact(text) == text


def test_a_record_is_logged_without_secrets_of_its_message_arguments_and_traceback():
    declare_secret("declared-canary")
    try:
        raise ValueError("in declared-canary")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "of %s", ("declared-canary",), sys.exc_info())
    line = RedactingFormatter("%(message)s").format(record)
    assert line.startswith("of ***\nTraceback")
    assert line.endswith("ValueError: in ***")


def test_exceptions_that_nothing_catches_are_logged_without_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_TOKEN", "canary-token")
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "test CRITICAL root: uncaught exception in Thread-1" in done.stderr
    assert "of a thread: ***" in done.stderr
    assert "ValueError: of the program: ***" in done.stderr
    assert "canary-token" not in done.stderr

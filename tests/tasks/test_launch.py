"""`soundstage run`: which part, in which environment, and how a failure is passed on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from data.records import DataRefused, GateFailed
from tasks.launch import Config, check_server, child_environment, failure, peak_bytes
from tasks.summary import Journal, Outcome


def test_verbs_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="first = train comes after last = cut"):
        Config(first="train", last="cut")


def test_embedded_defaults_give_way_to_the_users_environment() -> None:
    ours = child_environment({"PATH": "/bin"}, Path("/checkout"))
    assert ours["PREFECT_HOME"] == "/checkout/data/store/prefect"
    assert ours["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] == "300"
    assert "PREFECT_API_URL" not in ours
    assert "MLFLOW_TRACKING_URI" not in ours
    theirs = child_environment({"PREFECT_HOME": "/mine", "PREFECT_API_URL": "http://here/api"}, Path("/checkout"))
    assert (theirs["PREFECT_HOME"], theirs["PREFECT_API_URL"]) == ("/mine", "http://here/api")


def test_commands_of_this_environment_come_first() -> None:
    first, _, rest = child_environment({"PATH": "/bin"}, Path("/checkout"))["PATH"].partition(os.pathsep)
    assert (Path(first) / "dvc").is_file()
    assert rest == "/bin"


@pytest.mark.parametrize(
    ("status", "kind"), [(2, ValueError), (3, RuntimeError), (4, GateFailed), (5, DataRefused), (1, RuntimeError)]
)
def test_failure_of_a_verb_is_passed_on_in_its_own_words(status: int, kind: type[Exception]) -> None:
    done = Outcome(stage="cut", ran=True, seconds=1)
    failed = Outcome(stage="gate", ran=True, seconds=1, status=status, error="too dark")
    error = failure(status, Journal(outcomes=(done, failed)))
    assert type(error) is kind
    assert str(error) == "gate: too dark"


def test_failure_before_any_verb_says_so() -> None:
    assert "before a verb failed" in str(failure(1, Journal()))
    assert "signal 9" in str(failure(-9, Journal()))


def test_peak_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert peak_bytes(1000) == 1_024_000
    monkeypatch.setattr("sys.platform", "darwin")
    assert peak_bytes(1000) == 1000


def test_server_that_does_not_answer_is_named_before_work_begins() -> None:
    check_server(None)
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:9/api.*unset the variable"):
        check_server("http://127.0.0.1:9/api")
    with pytest.raises(RuntimeError, match="PREFECT_API_URL = nonsense"):
        check_server("nonsense")

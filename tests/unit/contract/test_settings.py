"""This project's own variables: what they may be, and what an empty one is."""

import os
import pwd
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.contract import settings
from cluster.contract.run import provenance
from cluster.host.launch import folders
from cluster.host.launch.user_files import check_script
from cluster.host.options.request import Request
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.files import ROOT
from tests.support.launching import refusal


@pytest.mark.parametrize("name", [*settings.SECONDS, *settings.SWITCHES])
@pytest.mark.parametrize("value", ["abc", "nan", "inf", "-1", "1e9", "1 2", "yes"])
def test_a_value_that_a_setting_cannot_have_is_refused_before_anything_starts(name, value, monkeypatch, tmp_path):
    monkeypatch.setenv(name, value)
    refused = refusal(Request(runtime="local"))
    assert isinstance(refused, UsageError)
    assert name in str(refused)
    assert repr(value) in str(refused)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", [*settings.SECONDS, *settings.SWITCHES])
def test_an_empty_setting_is_not_set(name, monkeypatch):
    monkeypatch.setenv(name, "")
    settings.check_settings()
    default = settings.SECONDS[name].default if name in settings.SECONDS else True
    assert default == (settings.seconds(name) if name in settings.SECONDS else settings.is_on(name))


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_folder_it_is_this_checkout_s(value, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RUNS_DIR", "DATA_DIR"):
        monkeypatch.delenv(name)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert (ROOT / "runs", ROOT / "data") == (folders.runs_dir(), folders.data_dir())


@pytest.mark.parametrize("value", [None, "", "not/absolute"])
def test_a_user_may_have_no_home_folder(value, monkeypatch, tmp_path, theirs):
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    monkeypatch.delenv("HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("HOME", value)
    assert settings.home() is None
    assert theirs == check_script(str(theirs), tmp_path / "runs")
    monkeypatch.delenv("XDG_STATE_HOME")
    with pytest.raises(PrerequisiteError, match="XDG_STATE_HOME"):
        provenance.create_folder()


def test_a_home_folder_that_nobody_knows_is_reported(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="--script '~nobody-here/s.py'"):
        check_script("~nobody-here/s.py", tmp_path / "runs")
    assert settings.home() == Path(os.environ["HOME"])

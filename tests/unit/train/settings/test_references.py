"""`package.module:name`: found without running it, refused in one line, and the folder that tasks need for it."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.system.errors import UsageError
from tests.support import own_module
from train.settings import references

BUILT_IN = ("two_conv_cnn", "other_cnn")


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable[[str, str], Path]:
    return functools.partial(own_module.write, monkeypatch, tmp_path)


def refusal(reference: str) -> str:
    with pytest.raises(UsageError) as refused:
        references.check_reference("--model", reference, BUILT_IN)
    assert 1 == len(str(refused.value).splitlines())
    return str(refused.value)


def test_a_module_in_a_package_is_checked_without_running_the_package(write):
    write("own_package.__init__", "1 / 0")
    folder = write("own_package.nets", "def model(): pass\n")
    references.check_reference("--model", "own_package.nets:model", BUILT_IN)
    assert "did you mean 'model'?" in refusal("own_package.nets:modle")
    assert "'own_package.net'" in refusal("own_package.net:model")
    assert "'own_package.nets.deep'" in refusal("own_package.nets.deep:model")
    assert "own_package" not in sys.modules
    assert str(folder) in refusal("no_such_module:model")  # where it was looked for
    for reference in (":model", ".relative:model"):
        assert refusal(reference).startswith(f"--model {reference!r}: ")


def test_a_package_may_have_no_init(write):
    folder = write("own_spaces.nets", "def model(): return 7\n")
    references.check_reference("--model", "own_spaces.nets:model", BUILT_IN)
    assert 7 == references.load_object("--model", "own_spaces.nets:model")()
    assert folder == references.code_dir("own_spaces.nets:model")


def test_names_inside_of_functions_and_classes_are_not_the_modules(write):
    write("own_nets", "def model():\n    inner = 1\nclass Net:\n    def call(self): pass\n")
    for name in ("inner", "call"):
        assert f"has no {name!r}" in refusal(f"own_nets:{name}")


@pytest.mark.parametrize(
    "text",
    [
        "class model: pass",
        "from math import cos as model",
        "try:\n    pass\nexcept ImportError:\n    pass\nelse:\n    def model(): pass",
        "from math import *",  # what that brings is not known without running it
        "def __getattr__(name): return 1",
        "globals()['model'] = 1",
        "vars()['model'] = 1",
        "exec('model = 1')",
        "import sys\nsetattr(sys.modules[__name__], 'model', 1)",
    ],
)
def test_a_name_can_come_in_other_ways(text, write):
    write("own_nets", text)
    references.check_reference("--model", "own_nets:model", BUILT_IN)


def test_a_file_with_a_syntax_error_is_named_with_its_line(write):
    folder = write("own_nets", "def fine(): pass\ndef model(:\n")
    message = refusal("own_nets:model")
    assert message.startswith(f"{folder / 'own_nets.py'}: ")
    assert "line 2" in message


@pytest.mark.parametrize("name", sorted(references.RETRYABLE_ERRORS))
def test_an_error_of_a_lost_peer_is_not_blamed_on_the_function(name):
    lost = type(name, (Exception,), {})

    def model() -> None:
        raise lost("Collective ops is aborted by: Connection reset by peer")

    with pytest.raises(lost):
        references.call_user_function("--model", "own_nets:model", model)


@pytest.mark.parametrize(
    "reference",
    ["two_conv_cnn", "", "json:loads", "numpy.linalg:norm", "sys:exit", "no_such_module:model", "tests.x:y"],
)
def test_built_in_and_installed_modules_need_no_folder(reference, tmp_path, monkeypatch):
    """Names, the standard library, what is installed, what is built in, and this checkout."""
    monkeypatch.chdir(tmp_path)
    assert references.code_dir(reference) is None

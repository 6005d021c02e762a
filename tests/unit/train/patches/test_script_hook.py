"""The `sitecustomize` of a script's process: patches Keras on import, and names the call that needs Keras 2."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from cluster.contract.recovery import ends
from train.patches import hook as folder_of_hook
from train.patches.hook import sitecustomize as hook

HOOK = Path(hook.__file__).parent
KERAS = """
class Checkpoint:
    def __init__(self, path):
        raise ValueError("The filepath provided must end in `.keras`. Received: filepath=model\\nmore")

class Adam: pass

def fit():
    raise ValueError("Input 0 of layer dense is incompatible with the layer")
"""


@pytest.fixture
def run(monkeypatch, tmp_path) -> Callable[[str], Exception]:
    """Runs a script with something that refuses as Keras 3 does, from the same place; returns its error."""
    keras, script = ModuleType("keras.src.callbacks"), tmp_path / "train.py"
    exec(compile(KERAS, "/x/site-packages/keras/src/callbacks.py", "exec"), vars(keras))
    monkeypatch.setitem(sys.modules, "keras", keras)
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)

    def failed(call: str) -> Exception:
        script.write_text(f"import os\n{call}\n")
        with pytest.raises(Exception) as raised:
            exec(compile(script.read_text(), str(script), "exec"), {"keras": keras, "__name__": "__main__"})
        return raised.value

    return failed


def explained(error: Exception) -> str | None:
    return hook.needs_keras_2(error, error.__traceback__)


@pytest.mark.parametrize("call", ["keras.Checkpoint('model')", "keras.Adam().lr"])
def test_a_call_that_keras_3_refuses_must_be_named(call, run, monkeypatch):
    error = run(call)
    line = explained(error)
    assert line is not None
    assert f"line 2 of train.py, `{call}`" in line
    assert "TF_USE_LEGACY_KERAS=1" in line
    assert 1 == len(line.splitlines())
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    assert explained(error) is None


def test_the_cause_must_have_the_error_once_and_the_call(run, capsys):
    error = run("keras.Checkpoint('" + "model" * 150 + "')")
    hook.explain(type(error), error, error.__traceback__)
    cause = ends.find_error(capsys.readouterr().err.splitlines(), 1)
    assert cause is not None
    assert cause.startswith("ValueError: The filepath provided must end in")
    assert 1 == cause.count("must end in")
    assert "line 2 of train.py, `keras.Checkpoint('model" in cause
    assert cause.endswith("--env TF_USE_LEGACY_KERAS=1")


@pytest.mark.parametrize("call", ["keras.fit()", "[].nothing", "open('/nowhere/it')"])
def test_any_other_error_must_speak_for_itself(call, run):
    assert explained(run(call)) is None


def test_a_script_that_joins_no_task_must_be_warned_of(monkeypatch, capsys):
    from tensorflow.python.eager import context

    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}')
    context.ensure_initialized()
    for joined in (None, "a cluster"):
        monkeypatch.setattr(context.context(), "_collective_ops_server_def", joined)
        hook.warn_of_solitude()
        assert (joined is None) == ("MultiWorkerMirroredStrategy" in capsys.readouterr().err)


def test_the_hook_must_find_what_is_imported_and_hide_nothing(tmp_path):
    """The script has another Keras, and the machine another `sitecustomize`."""
    site = tmp_path / "site"
    (site / "keras").mkdir(parents=True)
    (site / "keras" / "__init__.py").write_text("class config:\n    backend = staticmethod(lambda: 'jax')\n")
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_machine = True\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, keras\nassert of_the_machine\nassert sys.path[0] == sys.argv[1]\n"
        "assert not [name for name in sys.modules if name.startswith('_tf_cluster')]\nprint(keras.config.backend())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOOK), str(site)])}
    command = [sys.executable, str(script), str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (0, "jax\n", "") == (ended.returncode, ended.stdout, ended.stderr)
    assert [] == [path.name for path in HOOK.glob("*.py") if path.name != "sitecustomize.py"]
    assert folder_of_hook.__file__ is None  # a namespace: nothing in it can be imported by another name

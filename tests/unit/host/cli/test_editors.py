"""The files for editors name what is there: the interpreter, TensorBoard's port, the tests."""

import json
import re
import subprocess
import sys

import tasks
from cluster.host.runtime import debugging, tensorboard
from cluster.system.paths import ROOT


def test_vs_code_attaches_where_a_task_waits_and_debugs_the_tests_of_a_file():
    configurations = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"]
    attach, test = sorted(configurations, key=lambda each: each["request"])
    assert {"host": debugging.LOOPBACK, "port": debugging.PORT} == attach["connect"]
    assert ("pytest", "${file}") == (test["module"], test["args"][-1])


def test_a_dev_container_is_set_up_by_make_and_shows_tensorboard():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    setup, prepare = container["postCreateCommand"].split(" && ")
    assert "make setup" == setup
    assert re.search("^setup:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    interpreter = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter == "${containerWorkspaceFolder}/" + prepare.split()[0]
    assert ["-m", "invoke"] == prepare.split()[1:3]
    assert prepare.split()[3] in tasks.ns.task_names
    assert [tensorboard.PORT] == container["forwardPorts"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert container["image"].split("-")[0] in dockerfile  # the same Python as in the images


def invoke(*words: str) -> str:
    command = [sys.executable, "-m", "invoke", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_shell_completes_tasks_and_their_options():
    script = invoke("--print-completion-script", "bash")
    program = f'invoke() {{ "{sys.executable}" -m invoke "$@"; }}'
    tab = 'COMP_WORDS=(invoke up --wor); _complete_invoke invoke --wor; echo "${COMPREPLY[@]}"'
    typed = ["/bin/bash", "-c", f"{script}\n{program}\n{tab}"]
    done = subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "--workers\n" == done.stdout, done.stderr
    assert {"up", "image.build"} <= set(invoke("--complete", "--", "invoke").split())

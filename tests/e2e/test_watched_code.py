"""A run in containers whose code is worked on: what is saved trains, from where training was."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.host.image import engine
from tests.e2e.scenario import ENDLESS, TRAINING, Clusters, step_of, summary
from tests.support.waiting import wait_for

OWN_IMAGES = "tf-cluster-tests-watched"
SOON_S = 240
CHANGED = "this is the changed code"


@pytest.fixture
def edited(data, tmp_path, copy_checkout) -> Iterator[Clusters]:
    """Commands of a copy of the checkout, with separate images."""
    folder = tmp_path / "checkout"
    copy_checkout(folder)
    clusters = Clusters(folder / "runs", {"IMAGE_NAMESPACE": OWN_IMAGES}, folder)
    yield clusters
    clusters.invoke("down")
    for name in ("train:cpu", "tensorboard:latest"):
        engine.ask("image", "rm", f"{OWN_IMAGES}/{name}", timeout_s=60)


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_a_change_of_the_code_must_start_every_task_again(edited):
    options = ("--name=edited", "--workers=1", "--runtime=docker", "--tensorboard-port=0", "--detach")
    edited.invoke("up", *options, "--", *TRAINING, *ENDLESS, "--checkpoint-every", "50", timeout_s=900)
    run, log = edited.run("edited"), edited.checkout / "watch.log"
    with log.open("w") as output:
        watch = subprocess.Popen(
            [sys.executable, "-m", "invoke", "image.watch"],
            cwd=edited.checkout,
            env=os.environ | edited.settings | edited.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: "Watch enabled" in log.read_text(), "Compose", 120)
        wait_for(lambda: run.saved_steps, "a checkpoint", SOON_S)

        def runs_changed_code(task: str) -> bool:
            return run.log(task).exists() and CHANGED in run.log(task).read_text()

        program = edited.checkout / "train" / "program.py"
        program.write_text(f"{program.read_text()}\n\nprint({CHANGED!r}, flush=True)\n")
        wait_for(lambda: all(map(runs_changed_code, ("chief", "worker-0"))), "the changed code", SOON_S)
        began = step_of(run)
        wait_for(lambda: step_of(run) > began, "a step", SOON_S)
        assert not run.outcome

        generation = run.generation
        program.write_text(f"{program.read_text()}\nthis is no Python\n")
        wait_for(lambda: "Build failed" in log.read_text(), "the compiler", SOON_S)
        assert (generation, None) == (run.generation, run.outcome)  # training continues
        edited.invoke("stop")
        assert 0 == watch.wait(60), log.read_text()
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait(60)
    assert "stopped" == summary(run)["state"]
    assert summary(run)["restarts"][0]["cause"] == "its code was changed"

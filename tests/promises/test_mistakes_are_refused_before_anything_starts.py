"""A mistake is one line with its value, its fix and its exit code, and nothing starts."""

import pytest

from cluster.host.options.request import Request
from cluster.system.errors import EXIT_USAGE
from tests.support.command_line import invoke
from tests.support.launching import refusal


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["up", "--workers", "two"], 2, "error: --workers 'two': expected a whole number from 0 to 512"),
        (["up", "--runtime=local", "--", "--epoch", "1"], 2, "error: override '--epoch' is not an option"),
        (["up", "--runtime=docker"], 3, "error: --runtime docker: no Docker Engine answers (docker is not"),
        (["status"], 2, "error: there is no current run; start one with `invoke up`, or name one of "),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(tmp_path, words, code, message):
    done = invoke(*words, PATH=str(tmp_path))
    assert (code, 1, "") == (done.returncode, len(done.stderr.splitlines()), done.stdout)
    assert done.stderr.startswith(message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(strategy="mirrored", workers=2), ["--strategy", "--workers"]),
        (Request(loop="fitt"), ["--loop", "'fit'"]),
        (Request(strategy="tpu", runtime="docker"), ["--runtime", "--strategy"]),
        (Request(script="s.py", evaluator=True, preset="mnist", loop="fit"), ["--evaluator and --preset and --loop"]),
        (Request(script="s.py", precision="bf16", bitwise_elastic=2), ["--precision and --bitwise-elastic"]),
        (Request(script="s.py", checkpoint_every="5", hang_timeout=600), ["--checkpoint-every and --hang-timeout"]),
        (Request(script="s.py", min_workers=1, grow=True), ["--min-workers and --grow"]),
        (Request(overrides=("--pipeline.schedule", "1f1b")), ["--pipeline.schedule", "--schedule before"]),
        (Request(separate_chief=True), ["--separate-chief", "--script"]),
        (Request(hang_timeout=0), ["--hang-timeout"]),
        (Request(script="absent.py"), ["--script 'absent.py'"]),
        (Request(script="/"), ["--script '/'"]),
        (Request(resume="one", script="s.py"), ["--script", "--resume"]),
        (Request(requirements="absent.txt"), ["--requirements"]),
        (Request(runtime="dokcer"), ["--runtime 'dokcer'", "'docker'"]),
        (Request(runtime="local", memory="8GiB"), ["--memory", "--runtime docker"]),
        (Request(name="a/b"), ["'a/b'"]),
        (Request(tensorboard_port="65536"), ["--tensorboard-port"]),
        (Request(resume="absent"), ["'absent'"]),
        (Request(resume="a/b"), ["'a/b'"]),
        (Request(resume="one", name="two", fresh=True), ["--name and --fresh", "--resume"]),
        (Request(trust=True), ["--trust", "--resume"]),
        # Stages that do not fit, and clusters that can lose no worker.
        (Request(stages=2), ["--stages 2", "--strategy pipeline"]),
        (Request(stages=2, strategy="multiworker"), ["--stages 2", "--strategy pipeline"]),
        (Request(stages=3, workers=1, strategy="pipeline"), ["--stages 3", "--workers 2 or 5"]),
        (Request(stages=3, workers=0, devices=2, strategy="pipeline"), ["--stages 3", "--devices 3"]),
        (Request(stages=2, ps=1, strategy="pipeline"), ["--strategy pipeline", "--ps 0"]),
        (Request(workers=2, devices=2, strategy="pipeline"), ["--strategy pipeline", "--devices 1"]),
        (Request(min_workers=3), ["--min-workers 3", "--workers 2"]),
        (Request(min_workers=1, workers=0), ["--min-workers 1", "OneDeviceStrategy"]),
        (Request(min_workers=0, strategy="pipeline", stages=3), ["--min-workers 0", "Pipeline"]),
        (Request(grow=True), ["--grow", "--min-workers"]),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(resolved, monkeypatch, tmp_path, request_, named):
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    error = refusal(request_)
    assert EXIT_USAGE == error.exit_code
    assert [] == [option for option in named if option not in str(error)], error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(preset="fashion-mnst"), "--preset 'fashion-mnst'"),
        (Request(overrides=("--global-batch", "100")), "-- --global-batch 102"),
        (Request(micro_batches=5, bitwise_elastic=6), "--micro-batches 5"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path, request_, named):
    error = refusal(request_)
    assert EXIT_USAGE == error.exit_code
    assert named in str(error)
    assert not (tmp_path / "runs").exists()

"""The tasks' logs, and whether a task is healthy."""

import io
import re

import pytest

from cluster.agent import health
from cluster.contract.run.logs import LINE_BYTES, copy
from cluster.host.view import logs
from cluster.host.view.logs import print_logs
from tests.support.beats import beat
from tests.support.ending import end


def test_logs_of_several_tasks_carry_their_names(run, capsys):
    run.log("chief").write_text("one\ntwo\nhalf a li")
    run.log("worker-0").write_bytes(b"three \xff\n")
    print_logs(run, ["chief", "worker-0", "ps-0"], follow=False)
    shown = capsys.readouterr().out.splitlines()
    assert ["chief    | one", "chief    | two", "chief    | half a li", "worker-0 | three \ufffd"] == shown


def test_a_progress_bar_is_shown_in_its_last_state(run, capsys):
    """As Keras prints it: each state is drawn over the one before, and nothing ends the line before the epoch."""
    steps = [
        f"\x1b[1m{at}/2000\x1b[0m \x1b[32m{'━' * (at // 100)}\x1b[0m 1ms/step - loss: {1 / at:.4f}"
        for at in range(1, 2001)
    ]
    epoch = "".join("\b" * 80 + "\r" + step for step in steps)
    assert len(epoch) > 2 * LINE_BYTES
    printed = "".join(f"Epoch {number}/3\n{epoch}\n" for number in (1, 2, 3))
    copy(io.BufferedReader(io.BytesIO(printed.encode())), run.log("chief"), [])
    capsys.readouterr()
    print_logs(run, ["chief"], follow=False)
    last = f"2000/2000 {'━' * 20} 1ms/step - loss: 0.0005"
    assert [
        line for number in (1, 2, 3) for line in (f"Epoch {number}/3", last)
    ] == capsys.readouterr().out.splitlines()


def test_the_worker_of_our_trainer_refers_to_the_chief(run, capsys):
    run.log("worker-0").write_text("")
    print_logs(run, ["worker-0"], follow=False)
    assert "invoke logs chief" in capsys.readouterr().err


def test_a_task_that_printed_nothing_is_named(run, capsys):
    print_logs(run, ["worker-0"], follow=False)
    out, err = capsys.readouterr()
    assert ("", 1) == (out, len(err.splitlines()))
    assert "worker-0" in err


START_UP = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795354087.737231   15772 port.cc:153] oneDNN custom operations are on.",
    "2026-11-22 13:00:00.1: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is optimized",
    "E0000 00:00:1.2 3 cuda_fft.cc:467] Unable to register cuFFT factory: it was registered already",
)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_in_a_terminal_each_task_has_a_colour_and_start_up_messages_are_left_out(run, capsys, monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("chief", "worker-0"):
        run.log(name).write_text("\n".join([*START_UP, "E0000 00:00:1.2 3 mine.cc:1] It broke", "port.cc"]) + "\n")
    print_logs(run, ["chief", "worker-0"], follow=False)
    assert 12 == len(capsys.readouterr().out.splitlines())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_logs(run, ["chief", "worker-0"], follow=False)
    shown = capsys.readouterr().out.splitlines()
    assert ["It broke", "port.cc", "It broke", "port.cc"] == [re.split(r"[|\]] |m ", line)[-1] for line in shown]
    assert bool(no_color) is ("\x1b" not in "".join(shown))


def test_the_log_of_one_task_is_shown_as_it_is(run, capsys):
    run.log("chief").write_text("one\ntwo\n")
    print_logs(run, ["chief"], follow=False)
    assert "one\ntwo\n" == capsys.readouterr().out


def test_followed_logs_go_on_until_the_run_ends(run, capsys, monkeypatch):
    run.log("chief").write_text("one\nt")
    more = iter(["wo\nthree\n", "four\n"])

    def meanwhile(_: float) -> None:
        if (text := next(more, None)) is None:
            end(run, "succeeded")
            text = "five\nsix"
        with run.log("chief").open("a") as log:
            log.write(text)

    monkeypatch.setattr(logs.time, "sleep", meanwhile)
    print_logs(run, ["chief"], follow=True)
    assert ["one", "two", "three", "four", "five", "six"] == capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("state", "age_s", "healthy"),
    [("training", 0, True), ("done", 60, True), ("training", 60, False), ("failed", 0, False)],
)
def test_a_task_is_healthy_while_its_heartbeat_is_fresh(run, state, age_s, healthy):
    beat(run, "chief", state, step=3, age_s=age_s)
    shown = "lost" if age_s and state == "training" else state
    assert (healthy, f"chief is {shown} at step 3") == health.check(run, "chief")


def test_a_task_without_a_heartbeat_is_not_healthy(run):
    assert (False, "chief has no heartbeat yet") == health.check(run, "chief")

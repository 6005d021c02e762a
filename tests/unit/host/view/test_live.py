"""The view of a run that trains."""

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.control import watch
from cluster.host.runtime import registry, tensorboard
from cluster.host.view.live import Live
from cluster.host.view.status import live_lines, read_status
from cluster.system.json_files import write_json
from tests.support.beats import beat, save
from tests.support.launching import no_shell

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def test_without_a_terminal_only_news_are_printed(run, capsys):
    live = Live()
    for state, step in [("waiting", 0), ("waiting", 0), ("training", 5), ("saving", 6), ("training", 7), ("done", 8)]:
        beat(run, "chief", state, step=step)
        live.show(read_status(run))
    assert ["chief waiting", "chief training", "step 5", "chief done"] == capsys.readouterr().out.splitlines()


def test_a_step_that_takes_long_is_reported_once(run, capsys, monkeypatch):
    monkeypatch.setattr(Live, "LINE_EVERY_S", 0.0)
    live = Live()
    for step in (5, 5, 5, 6):
        beat(run, "chief", "training", step=step)
        live.show(read_status(run))
    assert ["chief training", "step 5", "step 6"] == capsys.readouterr().out.splitlines()


def test_why_a_run_does_not_begin_is_printed_once(run, capsys, monkeypatch):
    said = iter(["job 7 is queued: Priority"] * 2 + ["job 7 is queued: Resources", ""])
    monkeypatch.setattr(registry.LOCAL, "scheduler_status", lambda run: next(said))
    live = Live()
    for _ in range(4):
        live.show(read_status(run))
    beat(run, "chief", "training", step=5)
    live.show(read_status(run))
    lines = ["job 7 is queued: Priority", "job 7 is queued: Resources", "chief training", "step 5"]
    assert lines == capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("no_colour", [False, True])
def test_in_a_terminal_the_table_redraws_itself(run, capsys, monkeypatch, no_colour):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    beat(run, "chief", "training", step=1)
    with Live() as live:
        live.show(read_status(run))
        first = capsys.readouterr().out.removeprefix(HIDE_CURSOR)
        assert 6 == len(first.splitlines())  # the first line takes two
        assert max(map(len, first.splitlines())) <= 40  # a wrapped line could not be taken back
        beat(run, "chief", "training", step=2)
        live.show(read_status(run))
        assert capsys.readouterr().out.startswith("\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K")
    assert SHOW_CURSOR in capsys.readouterr().out
    live.clear()
    assert "" == capsys.readouterr().out


def test_the_screen_shows_how_far_a_run_is(run):
    beat(run, "chief", "training", step=30, steps_total=120, examples_per_s=480.0, loss=0.5)
    beat(run, "worker-0", "training", step=30)
    run.event("worker-0", "restarted", cause="killed", step=20)
    save(run, 10)
    shown = live_lines(read_status(run), [3.0, 2.0, 1.0], 80)
    assert max(map(len, shown[:-3])) <= 80
    text = "\n".join(shown)
    for part in (
        " 25%",
        "step 30/120",
        "18 s left",
        "loss   █▅▁ 0.5000",
        "saved  step 10, ",
        "worker-0: restarted (killed) at step 20",
    ):
        assert part in text, part
    assert ["TASK", "chief", "worker-0"] == [line.split()[0] for line in shown[-3:]]


def test_the_screen_of_a_run_that_has_just_begun_is_short(run):
    assert "step 0" in "\n".join(live_lines(read_status(run), [], 40))


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    beat(run, "chief", "training", step=1)
    with Live() as live:
        live.show(read_status(run))
    assert ["chief training", "step 1"] == capsys.readouterr().out.splitlines()


def script(run: RunFolder) -> RunFolder:
    write_json(run.config, {"script": "train.py", "arguments": []})
    return run


def test_the_newest_line_of_each_task_of_a_script_is_shown(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    bar = f"\b\b\r469/469 {'-' * 90} loss: 0.25"
    script(run).log("chief").write_text(f"Epoch 1/2\n{bar}")
    run.log("worker-0").write_text("ready\x1b[2J\n")
    for task in ("chief", "worker-0"):
        beat(run, task, "training")
    shown = live_lines(read_status(run), [], 80)
    assert max(map(len, shown)) <= 80
    assert shown[-2].startswith("chief     469/469 ---")
    assert shown[-2].endswith("loss: 0.25")
    assert ["worker-0", "ready"] == shown[-1].split()


def test_without_a_terminal_the_chief_s_output_is_shown(run, capsys):
    beat(script(run), "chief", "training")
    with Live(run) as live:
        run.log("chief").write_text("one\n10 %\r20 %")
        live.show(read_status(run))
        assert "chief | one" in capsys.readouterr().out.splitlines()
        live.show(read_status(run))
    assert ["chief | 20 %"] == capsys.readouterr().out.splitlines()


def test_a_resumed_script_s_earlier_output_is_not_shown_again(run, capsys):
    script(run).log("chief").write_text("before\n")
    run.begin_generation(1, resumed=True)
    with Live(run) as live:
        with run.log("chief").open("a") as log:
            log.write("after\n")
        live.show(read_status(run))
    assert ["chief | after"] == capsys.readouterr().out.splitlines()


def test_the_view_stays_while_tensorboard_starts(run, monkeypatch):
    shown: list[int] = []

    def start(*_, while_waiting, **options):
        beat(run, "chief", "training", step=7)
        while_waiting()
        return 6006

    monkeypatch.setattr(tensorboard, "start", start)
    watch._start_tensorboard(
        run, None, "local", no_shell, watch._shower(run, lambda value: shown.append(value["step"]))
    )
    assert [7] == shown

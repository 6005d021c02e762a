"""The live view and the logs: what they show, that nothing in them steers the terminal, and that lines fit it."""

import re

import pytest

from cluster.agent.schedulers import health
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import TraceAnswer
from cluster.host.checks import rerun
from cluster.host.control import profile
from cluster.host.runtime import registry
from cluster.host.view import live
from cluster.host.view.columns import columns
from cluster.host.view.live import Live, print_logs
from cluster.host.view.status import ended_lines, live_lines, read_status, status_table
from cluster.system.json_files import read_json, write_json
from cluster.system.terminal import WIDE, fit, terminal_width
from tests.support.beats import beat, end, save

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    ("every_s", "seen", "printed"),
    [
        (
            10.0,
            [("waiting", 0), ("waiting", 0), ("training", 5), ("saving", 6), ("training", 7), ("done", 8)],
            ["chief waiting", "chief training", "step 5", "chief done"],
        ),
        (0.0, [("training", 5)] * 3 + [("training", 6)], ["chief training", "step 5", "step 6"]),
    ],
)
def test_without_a_terminal_that_can_move_its_cursor_only_news_are_printed(
    run, capsys, monkeypatch, terminal, every_s, seen, printed
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TERM", "dumb" if terminal else "xterm")
    monkeypatch.setattr(Live, "LINE_EVERY_S", every_s)
    with Live() as live:
        for state, step in seen:
            beat(run, "chief", state, step=step)
            live.show(read_status(run))
    assert printed == capsys.readouterr().out.splitlines()


def test_why_a_run_does_not_begin_is_printed_once(run, capsys, monkeypatch):
    said = iter(["job 7 is queued: Priority"] * 2 + ["job 7 is queued: Resources", ""])
    monkeypatch.setattr(registry.LOCAL, "scheduler_status", lambda run: next(said))
    live = Live()
    for _ in range(4):
        live.show(read_status(run))
    assert ["job 7 is queued: Priority", "job 7 is queued: Resources"] == capsys.readouterr().out.splitlines()


def test_in_a_terminal_the_table_redraws_itself(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    beat(run, "chief", "training", step=1)
    with Live() as live:
        live.show(read_status(run))
        first = capsys.readouterr().out.removeprefix(HIDE_CURSOR)
        assert 6 == len(first.splitlines())  # the first line takes two
        assert max(map(len, first.splitlines())) <= 40  # a wrapped line could not be taken back
        beat(run, "chief", "training", step=2)
        live.show(read_status(run))
        assert capsys.readouterr().out.startswith("\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K")
        for step in range(3, 60):  # more losses than the line of blocks has room for
            beat(run, "chief", "training", step=step, loss=1 / step)
            live.show(read_status(run))
        assert "▁ 0.0169" in capsys.readouterr().out
    assert SHOW_CURSOR in capsys.readouterr().out
    live.clear()
    assert "" == capsys.readouterr().out


def test_the_screen_shows_how_far_a_run_is(run):
    assert "step 0" in "\n".join(live_lines(read_status(run), [], 40))
    beat(run, "chief", "training", step=30, steps_total=120, examples_per_s=480.0, loss=0.5)
    beat(run, "worker-0", "training", step=30)
    run.event("worker-0", "restarted", cause="killed", step=20)
    save(run, 10)
    shown = live_lines(read_status(run), [3.0, 2.0, 1.0], 80)
    assert max(map(len, shown[:-3])) <= 80
    text = "\n".join(shown)
    for part in ("25%", "30/120", "18 s left", "█▅▁ 0.5000", "step 10", "worker-0: restarted (killed) at step 20"):
        assert part in text, part
    assert ["TASK", "chief", "worker-0"] == [line.split()[0] for line in shown[-3:]]


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


@pytest.mark.parametrize("resumed", [False, True])
def test_without_a_terminal_the_chief_s_output_is_shown_but_not_that_of_before_a_resume(run, capsys, resumed):
    script(run).log("chief").write_text("before\n")
    if resumed:
        run.begin_generation(1, resumed=True)
    with Live(run) as live:
        with run.log("chief").open("a") as log:
            log.write("one\n10 %\r20 %")
        live.show(read_status(run))
        lines = [] if resumed else ["chief | before"]
        assert [*lines, "chief | one"] == capsys.readouterr().out.splitlines()
        live.show(read_status(run))
    assert ["chief | 20 %"] == capsys.readouterr().out.splitlines()


def test_logs_of_several_tasks_carry_their_names(run, capsys):
    run.log("chief").write_text("one\ntwo\nhalf a li")
    run.log("worker-0").write_bytes(b"three \xff\n")
    print_logs(run, ["chief", "worker-0", "ps-0"], follow=False)
    shown = capsys.readouterr().out.splitlines()
    assert ["chief    | one", "chief    | two", "chief    | half a li", "worker-0 | three \ufffd"] == shown


@pytest.mark.parametrize(("last", "shown"), [(None, ["one", "two", "three"]), (2, ["two", "three"]), (0, [])])
def test_logs_can_begin_with_the_last_lines(run, capsys, last, shown):
    run.log("chief").write_text("one\ntwo\nthree\n")
    print_logs(run, ["chief"], follow=False, last=last)
    assert shown == capsys.readouterr().out.splitlines()


def test_a_task_that_printed_nothing_is_named(run, capsys):
    print_logs(run, ["worker-0"], follow=False)
    assert "worker-0" in capsys.readouterr().err
    run.log("worker-0").write_text("")
    print_logs(run, ["worker-0"], follow=False)
    out, err = capsys.readouterr()
    assert ("", 1) == (out, len(err.splitlines()))
    assert "invoke logs chief" in err


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


def test_followed_logs_continue_until_the_run_ends(run, capsys, monkeypatch):
    run.log("chief").write_text("one\nt")
    more = iter(["wo\nthree\n", "four\n"])

    def print_more(_: float) -> None:
        if (text := next(more, None)) is None:
            end(run, "succeeded")
            text = "five\nsix"
        with run.log("chief").open("a") as log:
            log.write(text)

    monkeypatch.setattr(live.time, "sleep", print_more)
    print_logs(run, ["chief"], follow=True)
    assert ["one", "two", "three", "four", "five", "six"] == capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("state", "age_s", "healthy"),
    [("training", 0, True), ("done", 60, True), ("training", 60, False), ("failed", 0, False), ("", 0, False)],
)
def test_a_task_is_healthy_while_its_heartbeat_is_fresh(run, state, age_s, healthy):
    if state:
        beat(run, "chief", state, step=3, age_s=age_s)
    assert healthy is health.describe_health(run, "chief")[0]


HOSTILE = "\x1b]0;title\x07\x1b[2J\nroot cause: none \u202e\x9b2J"


def test_nothing_that_a_task_reports_steers_the_terminal(run, capsys):
    beat(run, "chief", "training", role=HOSTILE)
    beat(run, "worker-0", HOSTILE)
    Live().show(read_status(run))
    save(run, 1)
    end(run, "failed", task="chief", exit_code=1, error=f"loss {HOSTILE}")
    value = read_status(run)
    lines = [*status_table(value), *ended_lines(run), *status_table(value | {"script": HOSTILE})]
    verdict = rerun.RunComparison(
        "different", 1, 0.5, 1, same_weights=False, differences=[f"code.commit: {HOSTILE} there"]
    )
    lines += [
        *rerun.rerun_lines(run, verdict),
        *profile.trace_lines(run, TraceAnswer(id="1", task=HOSTILE, first=1, last=2), 2),
    ]
    assert all(line.isprintable() for line in [*lines, *capsys.readouterr().out.split("\n")])
    assert r"\x1b]0;title\x07\x1b[2J\nroot cause: none \u202e\x9b2J" in "\n".join(lines)  # and it can still be read
    assert not [line for line in lines if line.startswith("root cause: none")]
    assert HOSTILE in read_json(run.summary)["cause"]["error"]  # what is kept stays as it was


def test_logs_keep_colours_in_a_terminal_alone(run, capsysbinary, monkeypatch):
    end(run, "succeeded")
    run.log("chief").write_bytes(b"\x1b[31mred\x1b[m\tand \x1b[2J\x1b]52;c;aWQ=\x07 \x9b gone\n")
    print_logs(run, ["chief"], follow=False)
    assert "red\tand  \ufffd gone\n".encode() == capsysbinary.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_logs(run, ["chief"], follow=False)
    assert "\x1b[31mred\x1b[m\tand  \ufffd gone\n".encode() == capsysbinary.readouterr().out


WORDS = " ".join(["word"] * 30)


def test_a_line_is_wrapped_below_its_text_and_not_below_its_label():
    assert ["run folder   runs/one"] == fit(["run folder   runs/one"], 40)
    first, *rest = fit([f"weights      {WORDS}"], 40)
    assert first.startswith("weights      word")
    assert {13} == {len(line) - len(line.lstrip()) for line in rest}
    assert max(map(len, [first, *rest])) <= 40


def test_paths_and_commands_stay_whole():
    path, command = f"/home/{'x' * 90}", "`invoke up --resume fashion_mnist`"
    assert f"{path}:" in [line.strip() for line in fit([f"error: {path}: it is full; free space"], 40)]
    assert any(command in line for line in fit([f"error: the run has ended, so that {command} continues"], 40))


def test_the_last_column_is_wrapped_or_without_room_shown_below_its_row():
    head, *rest = columns([("TASK", "WHAT"), ("chief", WORDS)], width=50)
    assert max(map(len, rest)) <= 50
    assert {head.index("WHAT")} == {line.index("word") for line in rest}
    lines = columns([("STRATEGY", "DETAIL"), ("x" * 50, WORDS), ("y", "")], width=70)
    assert ["STRATEGY", "    DETAIL", "x" * 50] == lines[:3]
    assert "y" == lines[-1]
    assert max(map(len, lines)) <= 70


@pytest.mark.parametrize("columns", ["", "0", "x"])
def test_without_a_terminal_lines_are_not_wrapped(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert WIDE == terminal_width()
    monkeypatch.setenv("COLUMNS", "72")
    assert 72 == terminal_width()

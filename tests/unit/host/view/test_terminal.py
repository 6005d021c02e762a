"""What a task reports does not steer the terminal."""

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import TraceAnswer
from cluster.host.checks import rerun
from cluster.host.control import trace
from cluster.host.view.ended import ended_lines
from cluster.host.view.live import Live
from cluster.host.view.logs import print_logs
from cluster.host.view.status import read_status, status_table
from cluster.system.json_files import read_json
from tests.support.beats import beat, save
from tests.support.ending import end

HOSTILE = "\x1b]0;title\x07\x1b[2J\nroot cause: none \u202e\x9b2J"


def lines_of(run: RunFolder) -> list[str]:
    value = read_status(run)
    return [*status_table(value), *ended_lines(run, "runs/demo"), *status_table(value | {"script": HOSTILE})]


def test_nothing_that_a_task_reports_steers_the_terminal(run):
    beat(run, "chief", "training", role=HOSTILE)
    beat(run, "worker-0", HOSTILE)
    save(run, 1)
    end(run, "failed", task="chief", exit_code=1, error=f"loss {HOSTILE}")
    lines = lines_of(run)
    assert all(line.isprintable() for line in lines)
    assert r"\x1b]0;title\x07\x1b[2J\nroot cause: none \u202e\x9b2J" in "\n".join(lines)  # and it can still be read
    assert not [line for line in lines if line.startswith("root cause: none")]
    assert HOSTILE in read_json(run.summary)["cause"]["error"]  # what is kept stays as it was


def test_neither_does_a_run_that_is_watched(run, capsys):
    beat(run, "chief", HOSTILE, step=1)
    Live().show(read_status(run))
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


def test_neither_do_a_comparison_and_a_trace(run):
    verdict = rerun.Verdict("different", 1, 0.5, 1, same_weights=False, differences=[f"code.commit: {HOSTILE} there"])
    answer = TraceAnswer(id="1", task=HOSTILE, first=1, last=2)
    assert all(line.isprintable() for line in [*rerun.lines(run, verdict), *trace.lines(run, answer, 2)])


def test_logs_keep_colours_in_a_terminal_alone(run, capsysbinary, monkeypatch):
    end(run, "succeeded")
    run.log("chief").write_bytes(b"\x1b[31mred\x1b[m\tand \x1b[2J\x1b]52;c;aWQ=\x07 \x9b gone\n")
    print_logs(run, ["chief"], follow=False)
    assert "red\tand  \ufffd gone\n".encode() == capsysbinary.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_logs(run, ["chief"], follow=False)
    assert "\x1b[31mred\x1b[m\tand  \ufffd gone\n".encode() == capsysbinary.readouterr().out

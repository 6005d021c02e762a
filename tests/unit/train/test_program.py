"""What is kept of what a task's program prints."""

import os
import sys

from cluster.agent.task_process import Script, Trainer

PRINTS = """
print("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR")
print("I0000 00:00:1.5 7 port.cc:153] oneDNN custom operations are on. You may see slightly different results")
print("step 1")
"""


def test_what_tensorflow_says_at_any_log_level_is_not_logged(tmp_path):
    trainer = Trainer([sys.executable, "-c", PRINTS], dict(os.environ), tmp_path / "log")
    assert 0 == trainer.wait(30)
    trainer.end(0)
    assert "step 1\n" == (tmp_path / "log").read_text()
    assert "exit code 0, last line: step 1" == trainer.error(0)


def test_a_script_s_output_is_logged_as_it_is(tmp_path):
    script = Script([sys.executable, "-c", PRINTS], dict(os.environ), tmp_path / "log", tmp_path / "work")
    script.open_gate({})
    assert 0 == script.wait(30)
    script.end(0)
    assert 3 == len((tmp_path / "log").read_text().splitlines())


def test_a_new_life_begins_a_new_line_of_the_log(tmp_path):
    for _ in range(2):
        script = Script([sys.executable, "-c", "print('last', end='')"], dict(os.environ), tmp_path / "log", tmp_path)
        script.open_gate({})
        assert 0 == script.wait(30)
        assert "exit code 0, last line: last" == script.error(0)
        script.end(0)
    assert "last\nlast\n" == (tmp_path / "log").read_text()

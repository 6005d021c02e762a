"""A sweep: a loop over `up`, which can be killed and resumed. Each trial is a run with one combination of the values.

The record of a sweep lists its trials; the state of each is read from its run folder. Asynchronous successive halving
(Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2018) stops a trial at a rung if it is not among
the best third of the trials that have reached it.
"""

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from cluster.contract.run import claim, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Count, Number, Record
from cluster.contract.spec import check_run_name
from cluster.host.launch import folders, metrics_server, planning, teardown
from cluster.host.options.request import OPTIONS, Option, Request
from cluster.host.reports import listing
from cluster.host.view import interrupts
from cluster.system import processes
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UsageError
from cluster.system.files import ROOT
from cluster.system.json_files import read_json_lines, write_json
from cluster.system.messages import COMMAND, counted, short_path
from cluster.system.terminal import outliving_reader, print_lines

ETA = 3
"""The reduction factor: one in `ETA` trials continues at each rung, and each rung has `ETA` times as many steps."""
MAX_TRIALS = 1000
MAX_PARALLEL = 64
POLL_S = 0.5
MAX = 1e30
"""The value that replaces a non-finite loss in a record."""
NOT_SHARED = ("name", "resume", "fresh", "detach", "trust")
"""The options of `up` that the sweep itself sets."""
NOT_SWEPT = (*NOT_SHARED, "env", "secret", "tag", "note", "tensorboard_port", "metrics_port")
"""The options that cannot be an axis: those above, and options for which comparing values makes no sense."""


class Trial(Record):
    """A trial: the name of its run, and its value of each option."""

    run: str
    values: dict[str, str]

    @property
    def overrides(self) -> list[str]:
        return [f"--{key}={value}" for key, value in self.values.items() if not _option(key)]

    @property
    def note(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


class Sweep(Record):
    """The record of a sweep: `.sweeps/NAME/sweep.json` next to the run folders."""

    name: str
    options: tuple[str, ...]
    overrides: tuple[str, ...]
    code_dir: str = ""
    trials: tuple[Trial, ...]
    halving: Count = 0
    rungs: dict[str, dict[str, Number]] = field(default_factory=dict)
    """The loss of each run at each rung that it has reached, keyed by the rung's step."""
    dropped: dict[str, Count] = field(default_factory=dict)
    """The rung at which each run was stopped for not being among the best."""

    def metrics_port(self, trial: Trial) -> int:
        """Return the port of a trial's metrics, 0 for none; no other trial has it, as an ended one may still use it."""
        given = [int(word.partition("=")[2]) for word in self.options if word.startswith("--metrics-port=")]
        return given[0] + self.trials.index(trial) if any(given) else 0


def plan_sweep(request: Request, over: Sequence[str], halving: int) -> Sweep:
    """Return the sweep of a request over the product of the values, after trying every value."""
    if not (axes := [_axis(each) for each in over]):
        raise UsageError(f"a sweep needs values: {COMMAND} sweep --over optimizer.learning-rate=1e-3,1e-2")
    if len({key for key, _ in axes}) < len(axes):
        raise UsageError(f"--over {' --over '.join(over)}: give each option once, with all its values")
    total = math.prod(len(values) for _, values in axes)
    if total > MAX_TRIALS:
        raise UsageError(f"--over {' --over '.join(over)}: {total} trials, expected at most {MAX_TRIALS}")
    name = check_run_name(request.name or request.run_name())
    if _record(name).exists():
        raise UsageError(f"sweep {name!r} exists; `{COMMAND} sweep --resume {name}`, or choose another --name")
    trials = []
    for number, values in enumerate(itertools.product(*(values for _, values in axes)), 1):
        run = f"{name}-{number:0{len(str(total))}}"
        folders.check_folder(RunFolder(folders.runs_dir() / run), resumes=False, replaces=False)
        trials.append(Trial(run=run, values=dict(zip((key for key, _ in axes), values, strict=True))))
    seen: set[tuple[str, str]] = set()
    for trial in trials:
        if set(trial.values.items()) - seen:
            seen |= set(trial.values.items())
            given: dict[str, Any] = {"name": trial.run, "resume": ""}
            for key, value in trial.values.items():
                if option := _option(key):
                    given[option.name] = option.parse(value)
            planning.plan(replace(request, **given, overrides=(*request.arguments, *trial.overrides)))
    words, overrides = _words(request), (*request.train, *request.arguments)
    sweep = Sweep(
        name=name, options=words, overrides=overrides, code_dir=request.code_dir, trials=tuple(trials), halving=halving
    )
    _, last = OPTIONS["metrics_port"].bounds
    if sweep.metrics_port(trials[-1]) > last:
        needs = f"{counted(total, 'trial')} need as many ports from there on, up to {last}"
        raise UsageError(f"--metrics-port {request.metrics_port}: {needs}; choose a lower one")
    for trial in trials:
        metrics_server.check_port(sweep.metrics_port(trial))
    return sweep


def load_sweep(name: str) -> Sweep:
    """Return the sweep called `name`; raise UsageError if there is none, DamagedError if its record is damaged."""
    if not _record(check_run_name(name)).exists():
        known = sorted(path.parent.name for path in _record("*").parent.parent.glob("*/sweep.json"))
        where = short_path(folders.runs_dir())
        raise UsageError(f"there is no sweep {name!r} in {where}; known: {', '.join(known) or 'none'}")
    return records.read_record(_record(name), Sweep.from_json)


def run_sweep(sweep: Sweep, parallel: int) -> int:
    """Run every trial that has not ended, `parallel` at a time; return the exit code, or raise `Taken`."""
    with claim.hold_claim(RunFolder(_record(sweep.name).parent), "swept"):
        _record(sweep.name).parent.mkdir(parents=True, exist_ok=True)
        write_json(_record(sweep.name), sweep.to_json())
        loop = _Loop(sweep, parallel)
        with interrupts.handled():
            try:
                loop.run()
            except KeyboardInterrupt:
                loop.interrupt()
                print_lines(f"next: {COMMAND} sweep --resume {sweep.name}")
                return EXIT_INTERRUPTED
    rows = best_first(sweep.name)
    print_lines(*listing.table_lines(rows))
    done = {row["run"] for row in rows if row["result"] == records.OutcomeState.SUCCEEDED}
    stopped = {row["run"] for row in rows if row["result"] == records.OutcomeState.STOPPED}
    done |= stopped & loop.sweep.dropped.keys()
    bad = [trial.run for trial in sweep.trials if trial.run not in done]
    print_lines(f"{counted(len(bad), 'trial')} failed: {', '.join(bad)}" if bad else f"next: {COMMAND} tensorboard")
    return EXIT_FAILED if bad else EXIT_DONE


def best_first(name: str) -> list[dict[str, Any]]:
    """Return the rows of a sweep's runs as in `listing`, best score first, runs without a score last."""
    rows = listing.choose_runs(listing.list_runs(folders.runs_dir()), "run", False, [f"tag={name}"], 0)

    def rank(row: Mapping[str, Any]) -> float:
        if row["score"] is None:
            return math.inf
        return float(row["score"] if row["metric"].endswith(("loss", "error")) else -row["score"])

    return sorted(rows, key=rank)


class _Loop:
    """The trials of a sweep, each a process of `up` or `wait` while it runs."""

    def __init__(self, sweep: Sweep, parallel: int) -> None:
        self.sweep, self._parallel = sweep, parallel
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        waiting = [trial for trial in self.sweep.trials if self._command(trial)]
        done = len(self.sweep.trials) - len(waiting)
        print_lines(f"sweep {self.sweep.name}: {counted(len(self.sweep.trials), 'trial')}, {done} done before")
        while waiting or self._running:
            while waiting and len(self._running) < self._parallel:
                self._start(waiting.pop(0))
            for trial in self.sweep.trials:
                if (process := self._running.get(trial.run)) is None:
                    continue
                if process.poll() is None:
                    self._halve(trial)
                else:
                    del self._running[trial.run]
                    print_lines(self._describe_end(trial, process.returncode))
            time.sleep(POLL_S)

    def interrupt(self) -> None:
        """Forward an interrupt to every trial, which saves and stops; a second one kills them."""
        for again in (False, True):
            with contextlib.suppress(KeyboardInterrupt):
                for name, process in self._running.items():
                    if isinstance(process.args, list) and "wait" in process.args:
                        RunFolder(folders.runs_dir() / name).request_stop(f"{COMMAND} sweep")
                    else:
                        process.send_signal(signal.SIGTERM)  # it ignores SIGINT if a script started the sweep by `&`
                with outliving_reader():
                    if not again:
                        print_lines(f"stopping {counted(len(self._running), 'trial')}; a second Ctrl-C kills")
                for process in self._running.values():
                    process.wait()
                return

    def _command(self, trial: Trial) -> list[str]:
        """Return the command that continues a trial; empty if it has ended."""
        run = RunFolder(folders.runs_dir() / trial.run)
        if not run.cluster.exists() or run.incomplete:
            typed = [word.partition("=") for word in self.sweep.options]
            options = {"--tensorboard-port": ["0"], "--note": [trial.note]}
            options |= {key: [value for name, _, value in typed if name == key] for key, _, _ in typed}
            options |= {f"--{key}": [value] for key, value in trial.values.items() if _option(key)}
            if port := self.sweep.metrics_port(trial):
                options["--metrics-port"] = [str(port)]
            words = [f"{key}={value}" if value else key for key, values in options.items() for value in values]
            names = [f"--name={trial.run}", f"--tag={self.sweep.name}"]
            return ["up", *names, *words, "--", *self.sweep.overrides, *trial.overrides]
        if teardown.in_progress(run):
            return ["wait", trial.run]
        summary = run.load_summary()
        if summary and (summary.state != records.OutcomeState.STOPPED or trial.run in self.sweep.dropped):
            return []
        return ["up", "--resume", trial.run, "--tensorboard-port=0"]

    def _start(self, trial: Trial) -> None:
        words = self._command(trial)
        path = [each for each in (self.sweep.code_dir, os.environ.get("PYTHONPATH", "")) if each]
        with _record(self.sweep.name).with_name(f"{trial.run}.log").open("ab") as output:
            self._running[trial.run] = subprocess.Popen(
                [sys.executable, str(ROOT / "tasks.py"), *words],
                env=os.environ | ({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # it gets a Ctrl-C of the terminal only through `interrupt`
                preexec_fn=processes.die_with_parent,  # its run continues without it
            )
        port = self.sweep.metrics_port(trial)
        print_lines(f"{trial.run}: {trial.note}" + (f", metrics {metrics_server.address(port)}" if port else ""))

    def _describe_end(self, trial: Trial, code: int) -> str:
        run = RunFolder(folders.runs_dir() / trial.run)
        log = short_path(_record(self.sweep.name).with_name(f"{trial.run}.log"))
        if not run.cluster.exists():
            return f"{trial.run}: did not start, exit code {code}; see {log}"
        row = listing.describe_run(run)
        score = "" if row["score"] is None else f", {row['metric']} {row['score']:.4f}"
        if step := self.sweep.dropped.get(trial.run):
            return f"{trial.run}: stopped at step {step}, not among the best third"
        return f"{trial.run}: {row['result']}{score}" + ("" if code == EXIT_DONE else f"; see {log}")

    def _halve(self, trial: Trial) -> None:
        """Stop a trial at a rung if it is not among the best there."""
        run = RunFolder(folders.runs_dir() / trial.run)
        if trial.run in self.sweep.dropped:  # now, or before the sweep was killed
            run.request_stop(f"{COMMAND} sweep")
        if not self.sweep.halving or trial.run in self.sweep.dropped or run.incomplete:
            return
        rows = list(read_json_lines(run.metrics("chief")))
        newest = last_complete_step(rows)
        rung = self.sweep.halving
        while rung <= newest:
            reached = self.sweep.rungs.get(str(rung), {})
            if trial.run not in reached:
                reached = reached | {trial.run: loss_at(rows, rung)}
                is_good = is_among_best(reached, trial.run)
                dropped = {} if is_good else {trial.run: rung}
                rungs, dropped = self.sweep.rungs | {str(rung): reached}, self.sweep.dropped | dropped
                self.sweep = replace(self.sweep, rungs=rungs, dropped=dropped)
                write_json(_record(self.sweep.name), self.sweep.to_json())
                if not is_good:
                    return
            rung *= ETA


def last_complete_step(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the newest step whose rows are complete: an evaluation's row follows that of the training."""
    return max((row["step"] - ("eval_loss" not in row) for row in rows), default=-1)


def loss_at(rows: Sequence[Mapping[str, Any]], rung: int) -> float:
    """Return the newest evaluation loss up to a step or, without an evaluation, the newest training loss."""
    until = [row for row in rows if row["step"] <= rung]
    found = [row[name] for name in ("eval_loss", "loss") for row in reversed(until) if name in row]
    loss = found[0] if found else MAX
    return loss if loss is not None and math.isfinite(loss) else MAX


def is_among_best(reached: Mapping[str, float], run: str) -> bool:
    """Whether a run's loss is among the best third of the runs that have reached a rung."""
    return reached[run] < MAX and sorted(reached.values()).index(reached[run]) < math.ceil(len(reached) / ETA)


def _axis(text: str) -> tuple[str, list[str]]:
    name, _, values = text.removeprefix("--").partition("=")
    key, found = name.replace("_", "-"), [value for value in values.split(",") if value]
    if not key or not found:
        raise UsageError(f"--over {text!r}: expected OPTION=VALUE,VALUE, such as optimizer.learning-rate=1e-3,1e-2")
    option = _option(key)
    if option and (option.name in NOT_SWEPT or option.types == (bool,)):
        raise UsageError(f"--over {text!r}: --{option.key} has no values to compare; give it for all trials")
    return key, found


def _option(key: str) -> Option | None:
    return OPTIONS.get(key.replace("-", "_"))


def _words(request: Request) -> tuple[str, ...]:
    """Return the options of a request, except its name, as command-line words."""
    words: list[str] = []
    for option in OPTIONS.values():
        value = getattr(request, option.name)
        if option.name in NOT_SHARED or not request.is_given(option.name):
            continue
        if option.types == (bool,):
            words.append(f"--{option.key}")
        elif option.types == (list,):
            words += [f"--{option.key}={each}" for each in value]
        else:
            words.append(f"--{option.key}={value}")
    return tuple(words)


def _record(name: str) -> Path:
    return folders.runs_dir() / ".sweeps" / name / "sweep.json"

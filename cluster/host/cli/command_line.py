"""Shared by all tasks: decorators, options, optional positional arguments, error reports, a shell, output."""

import contextlib
import functools
import inspect
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import termios
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import Parameter
from pathlib import Path
from typing import Any

import invoke
from invoke import Config, Context, Exit, Result
from invoke.exceptions import CommandTimedOut, ThreadException, UnexpectedExit
from invoke.runners import Local

from cluster.host.cli import parsing
from cluster.host.image import engine
from cluster.host.launch import configuration, folders, mirroring
from cluster.host.options import run_file
from cluster.host.options.request import OPTIONS, Request
from cluster.system import errors, processes
from cluster.system.files import ROOT
from cluster.system.json_files import DISK_FULL
from cluster.system.messages import COMMAND, plain, short_path, system_error
from cluster.system.terminal import WIDE, error_text, terminal_width

HELP: dict[str, Any] = tomllib.loads(Path(__file__).with_name("help.toml").read_text())
SHARED_HELP = {name: f"{option.help} (default: {option.default})" for name, option in OPTIONS.items()} | {
    "file": "read options from this run file, see docs/reference/options.md; those given here win (default: none)",
    "json": "print as JSON (default: no)",
    "run": "run folder's name (default: the current run)",
}
"""The help of options that several tasks share, unless `help.toml` overrides it."""
KEPT_VARIABLES = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
"""The only PYTHON* variables that our programs inherit: others change the search for modules, skip assertions or keep a
program from ending (PYTHONSAFEPATH, PYTHONOPTIMIZE, PYTHONHOME, PYTHONINSPECT)."""
HOW_COMMANDS_RUN = Config.global_defaults()["run"] | {"echo": True, "echo_format": "{command}", "in_stream": False}
"""What `up` runs can be read and pasted; no task reads the terminal, and CI has none."""
del HOW_COMMANDS_RUN["dry"]
KNOWN_CODES = (errors.EXIT_USAGE, errors.EXIT_PREREQUISITE, errors.EXIT_TIMEOUT, errors.EXIT_INTERRUPTED)
UNTYPED: dict[tuple[type, ...], bool | None] = {(list,): None, (bool,): False}
"""The defaults of flags and of options that can be repeated, in invoke's form; any other option's is a string."""
INTERRUPTED_S = 5.0
"""How long a command may take to end if it is interrupted before invoke waits for it."""
COMMANDS: set[str] = set()
"""The names of all commands, which are invalid as names of new runs; set by `tasks.py`."""

parsing.install()


def task(
    *, has_dry_run: bool = False, repeated: Sequence[str] = (), **values: object
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that turns a function into a task; its first argument is invoke's context, its value the exit code.

    Options whose default is None are positional arguments, except those in `repeated`. Their help is in `help.toml`,
    with placeholders for `values`. A task `has_dry_run` if it changes things only through shell commands, so that
    invoke's own --dry is enough.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        module = Path(inspect.unwrap(body).__code__.co_filename).stem
        templates = HELP.get(module, {}).get(body.__name__, {})
        help_texts = {name: template.format(**values) for name, template in templates.items()}
        defaults = {parameter.name: parameter.default for parameter in inspect.signature(body).parameters.values()}
        make = invoke.task(
            auto_shortflags=False,
            positional=[name for name, default in defaults.items() if default is None and name not in repeated],
            iterable=repeated,
            help={name: text for name, text in SHARED_HELP.items() if name in defaults} | help_texts,
        )
        return make(report_errors(body, has_dry_run=has_dry_run))

    return decorate


def takes_request(
    *left_out: str, file_first: bool = False, has_dry_run: bool = False, **values: object
) -> Callable[[Callable[..., int | None]], Any]:
    """Decorator that turns a function `(c, request, ...)` into a task with the options of `Request` and its other ones.

    It does not take the options of the fields `left_out`; with `file_first` the run file may be given without `--file`.
    Of its other options one whose default is None may be repeated; `values` are those of its help.
    """
    taken = {name: option for name, option in OPTIONS.items() if name not in left_out}

    def decorate(body: Callable[..., int | None]) -> Any:
        context, _, *parameters = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def wrapped(c: Context, file: str = "", **typed: Any) -> int | None:
            file = file or ""
            own_options = {parameter.name: typed.pop(parameter.name, parameter.default) for parameter in parameters}
            parsed = parse_options(**typed)
            words = tuple(sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else [])
            if " ".join(words) != c.remainder:  # invoke joins the words and loses their quotes
                words = tuple(shlex.split(c.remainder))
            settings = run_file.read_run_file(file, taken) if file else None
            request = settings.request(parsed, words) if settings else Request(**parsed, overrides=words)
            request = mirroring.locate_mirror(request)
            if request.name in COMMANDS:
                raise errors.UsageError(f"--name {request.name} is also a command; choose another name")
            if not request.script and ("--help" in words or "-h" in words):
                print(configuration.ask_trainer(request, ["--", "-h"]))
                return None
            return body(c, request, **own_options)

        defaults = {option.name: UNTYPED.get(option.types, "") for option in taken.values()}
        options = [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in defaults.items()]
        file = Parameter("file", Parameter.KEYWORD_ONLY, default=None if file_first else "")
        extras = [file, *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters)]
        wrapped.__signature__ = inspect.Signature([context, *options, *extras])  # type: ignore[attr-defined]
        repeated = [parameter.name for parameter in (*options, *parameters) if parameter.default is None]
        return task(has_dry_run=has_dry_run, repeated=repeated, **values)(wrapped)

    return decorate


def parse_options(**words: Any) -> dict[str, Any]:
    """Return the fields of a request for the options that were typed."""
    return {name: OPTIONS[name].parse(word) for name, word in words.items() if word}


def report_errors(body: Callable[..., Any], *, has_dry_run: bool = False) -> Callable[..., Any]:
    """Report an expected error in one line with its exit code, not by a traceback; refuse --dry without a dry run."""

    @functools.wraps(body)
    def wrapped(c: Context, *arguments: Any, **options: Any) -> None:
        if c.config.run.dry and not has_dry_run:  # it only keeps commands from being run
            message = f"error: {COMMAND} --dry {body.__name__}: it has no dry run; leave out --dry"
            raise Exit(error_text(message), code=errors.EXIT_USAGE)
        c.config.run.update(HOW_COMMANDS_RUN)  # ~/.invoke.yaml or INVOKE_RUN_WARN, for one, would hide a failure
        c.config.timeouts.command = None
        ended = _ended(body, (c, *arguments), options)
        if parsing.has_closed_output() and not (ended and ended.message):
            ended = Exit(code=errors.EXIT_UNREAD)
        if ended:
            ended.message = error_text(ended.message) if ended.message else ended.message
            raise ended

    wrapped.__doc__ = (body.__doc__ or "").replace("invoke ", f"{COMMAND} ")
    return wrapped


def normalise_environment() -> None:
    """Remove variables that change how our programs run; open closed streams; escape what they cannot encode."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise errors.UsageError("the current folder was removed; change to one that exists, and try again") from None
    for name in [name for name in os.environ if name.startswith("PYTHON") and name not in KEPT_VARIABLES]:
        del os.environ[name]
    for closed in [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]:
        setattr(sys, closed, Path(os.devnull).open("r+"))  # noqa: SIM115  # or the next file gets its number
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _ended(body: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Exit | None:
    """Run a task; return the `Exit` to raise for its error or exit code, or None."""
    message = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `tf-cluster` blocks it while this is imported
        normalise_environment()
        code = body(*arguments, **options)
        return None if code is None else Exit(code=code)
    except Exit as ended:
        return ended
    except errors.ClusterError as error:
        message, code = f"error: {plain(str(error))}", error.exit_code
    except UnexpectedExit as error:
        code = error.result.exited if error.result.exited in KNOWN_CODES else errors.EXIT_FAILED
        if "\nerror: " not in f"\n{error.result.stderr}":  # our own commands have reported theirs
            message = f"error: {error.result.command!r} ended with exit code {error.result.exited}"
    except BrokenPipeError:
        code = errors.EXIT_UNREAD
    except ThreadException as error:  # from what shows a command's output
        if any(failure.type is not BrokenPipeError for failure in error.exceptions):
            raise
        code = errors.EXIT_UNREAD
    except OSError as error:
        text = f"{system_error(error)}; correct that and try again"
        if error.errno in DISK_FULL and not error.filename:
            where = f"{short_path(folders.runs_dir())}, or a temporary folder"
            text = f"{where}: {error.strerror}; free space, or set RUNS_DIR or TMPDIR to another disk"
        message, code = f"error: {text}", errors.EXIT_FAILED
    except KeyboardInterrupt:
        message, code = "interrupted", errors.EXIT_INTERRUPTED
    return Exit(message, code=code)


def ask_user(question: str) -> str:
    """Ask on the terminal, discarding earlier input; return the answer in lower case, `no` at the end of the input."""
    with contextlib.suppress(termios.error, OSError, ValueError):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return "no"


def show(value: Any, lines: Callable[[Any], Sequence[str]], *, as_json: bool) -> None:
    """Print a value as JSON, or as lines of text."""
    if as_json:
        print(json.dumps(value, indent=2))
    elif text := lines(value):
        print("\n".join(text))


def in_checkout(c: Context) -> AbstractContextManager[None]:
    """Context manager that runs commands in the checkout, whatever its path: invoke's own `cd` quotes only spaces."""
    prefix: AbstractContextManager[None] = c.prefix(f"cd {shlex.quote(str(ROOT))}")
    return prefix


def shell(
    c: Context, *, aside: bool = False, quiet: bool = False, secrets: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return a function that runs a command in the checkout, with the variables `secrets`, and prints its output.

    With `aside` the output goes to stderr, because a program reads stdout; with `quiet` the command itself is not
    printed, because a program may read the output.
    """
    c.config.runners.local = Runner

    def sh(command: str) -> object:
        bound_s = engine.patience_s(command)
        how: dict[str, Any] = {} if bound_s is None else {"timeout": bound_s}
        how |= {"echo": False, "out_stream": sys.stderr} if aside else {"echo": False} if quiet else {}
        how["env"] = dict(secrets or {})
        if (width := terminal_width()) < WIDE:
            how["env"]["COLUMNS"] = str(width)  # its output reaches the terminal through a pipe
        try:
            with in_checkout(c):
                return c.run(command, **how)
        except CommandTimedOut as error:
            message = f"{command!r} did not end in {bound_s:g} s and was killed; see whether `docker info` answers"
            raise errors.TimedOut(message) from error

    return sh


class Runner(Local):  # type: ignore[misc]  # invoke has no types
    """Runs a command in a separate process group, so that it ends together with everything that it started.

    The first Ctrl-C interrupts it, too, and the second kills it. invoke's own runner passes a Ctrl-C on as a character
    that no program reads without a terminal, and kills only the shell when a command takes too long: the client of
    the engine behind it would keep running and block its caller.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.process: subprocess.Popen[bytes] | None = None
        self._interrupts = 0

    def run(self, command: str, **options: Any) -> Result:
        """Run a command; raise KeyboardInterrupt if it was interrupted, whatever its exit code."""
        try:
            result = super().run(command, **options)
        except KeyboardInterrupt:
            if self.process is not None and not self._interrupts:  # invoke passes it on only while it waits
                self._signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    processes.wait(self.process, INTERRUPTED_S)
                self.kill()
            raise
        except UnexpectedExit as error:
            if self._interrupts:
                raise KeyboardInterrupt from error
            raise
        if self._interrupts:
            raise KeyboardInterrupt
        return result

    def echo(self, command: str) -> None:
        """Show a command before it runs, so that it can be pasted."""
        print(command, flush=True)

    def start(self, command: str, shell: str, env: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [shell, "-c", command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in what a script starts by `&`
        )

    def send_interrupt(self, interrupt: KeyboardInterrupt) -> None:  # noqa: ARG002  # invoke's name
        self._interrupts += 1
        self._signal(signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)

    def kill(self) -> None:
        """Kill the command and everything that it started, because it took too long."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        processes.signal_group(self.process, number)

    @property
    def process_is_finished(self) -> bool:
        """Whether the command has ended; it is not reaped before `returncode`, so that its group can be killed."""
        assert self.process is not None
        return processes.has_ended(self.process)

    def returncode(self) -> int:
        """Reap the command and whatever it left behind in its process group; return its exit code."""
        if self._interrupts:
            self.kill()  # whatever ignores the interrupt
        assert self.process is not None
        return self.process.wait()

    def _thread_join_timeout(self, target: Callable[..., Any]) -> int | None:  # invoke has no public setting for it
        """Return how many seconds to wait for its output, which a process that left the group may keep open."""
        return 1 if self.timed_out or self._interrupts > 0 else super()._thread_join_timeout(target)

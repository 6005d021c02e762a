"""What goes wrong in the first hour, and later: what one sees, why, and the next command.

`invoke docs.troubleshooting --write` makes docs/guides/troubleshooting.md from these tables, and the tests provoke
every row: the line on the screen must match `sees`, name `next`, and end with the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREREQUISITE, EXIT_TIMEOUT, EXIT_USAGE


@dataclass(frozen=True)
class Trouble:
    """A failure that a new user may meet."""

    name: str
    """Of its test."""
    sees: str
    """What the screen shows, with `...` for what depends on the machine."""
    why: str
    """The cause in words."""
    fix: str
    """What to do, for the document."""
    next: str
    """The part of the fix that the line on the screen itself has; empty where a log or another command has it."""
    exit_code: int


FIRST_HOUR = (
    Trouble(
        "no venv module",
        "error: python3 -m venv failed; install it (Debian: apt-get install python3-venv)",
        "Debian and Ubuntu package Python's `venv` apart",
        "`sudo apt-get install python3-venv`, then `make setup`",
        "apt-get install python3-venv",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "wrong Python",
        "error: ... is 3.9.18, expected Python 3.11 to 3.13; install one and run make with PYTHON=python3.11",
        "TensorFlow has wheels for some versions only",
        "`make setup PYTHON=python3.11`",
        "PYTHON=python3.11",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "no network for pip",
        "error: the package index cannot be reached; behind a proxy set HTTPS_PROXY, with a mirror PIP_INDEX_URL, "
        "and run make again (all that pip printed is in .build/pip.log)",
        "no internet, or only through a proxy or a mirror",
        "`HTTPS_PROXY=http://proxy:3128 make setup`, or `PIP_INDEX_URL=https://mirror/simple make setup`",
        "HTTPS_PROXY",
        EXIT_FAILED,
    ),
    Trouble(
        "no network for own packages",
        "--requirements '...': the package index cannot be reached; connect, or set PIP_INDEX_URL or PIP_FIND_LINKS",
        "the same, for the packages of your own code",
        "`PIP_INDEX_URL=... invoke up --requirements FILE`",
        "PIP_INDEX_URL",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "port taken",
        "port 127.0.0.1:... is in use by another program (...); end it, or choose another port: --port 6007, or "
        "leave it out",
        "something else, or another checkout's TensorBoard, listens there; `up` takes a free port",
        "`invoke tensorboard --port 6007`, or without --port",
        "--port 6007",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "no disk",
        "... MiB are free for ..., a run needs 512; free space, or set RUNS_DIR to another disk",
        "checkpoints, logs and the export would not fit",
        "`invoke clean --older 7d`, or `RUNS_DIR=/other/disk invoke up`",
        "RUNS_DIR",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "engine without Compose",
        "...: Docker Engine ... has no Compose plugin (`docker compose version` fails); install ...",
        "Docker without its Compose plugin, as in some distributions",
        "`sudo apt-get install docker-compose-plugin` (Debian: `docker-compose`), or `--runtime local`",
        "install",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "no permission on the socket",
        "...: no Docker Engine answers (permission denied ...); let this user use Docker "
        "(`sudo usermod -aG docker $USER`, then log in again)",
        "your user is not in the group `docker`",
        "`sudo usermod -aG docker $USER`, log in again; or `--runtime local`",
        "usermod -aG docker",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "no engine running",
        "...: no Docker Engine answers (...); start Docker (`sudo systemctl start docker`), or set DOCKER_HOST to "
        "where it answers",
        "the engine is not running",
        "`sudo systemctl start docker`; without `--runtime docker`, `up` uses local processes",
        "systemctl start docker",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "run name that exists",
        "run '...' exists; go on with --resume ..., or start it again with --name ... --fresh",
        "names are not reused by accident",
        "`invoke up --resume RUN`, or `--name RUN --fresh`",
        "--resume",
        EXIT_USAGE,
    ),
    Trouble(
        "batch that does not divide",
        "global_batch=... is not divisible by 5 replicas; use ...: -- --global-batch ...",
        "every replica takes the same number of examples",
        "`invoke up -- --global-batch 195`, as the line says",
        "-- --global-batch",
        EXIT_USAGE,
    ),
    Trouble(
        "unknown option of the training",
        "override '--optimizer.learning-rat' is not an option of the training config; did you mean "
        "'--optimizer.learning-rate'?",
        "a typo; the nearest name is in the line",
        "`invoke up -- --help` lists them",
        "learning-rate",
        EXIT_USAGE,
    ),
    Trouble(
        "preset with an error",
        "--preset '...'...ZeroDivisionError...",
        "your module raises an error when it is imported or called",
        "correct the line that the message names, then `invoke plan --preset ...`",
        ".py:",
        EXIT_USAGE,
    ),
    Trouble(
        "too little memory",
        "... tasks need about ... GiB of memory, ... GiB are free; use at most ... here",
        "every task is a process with a TensorFlow of its own",
        "fewer `--workers`",
        "use at most",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "killed for memory",
        "killed for memory: the task may use ... GiB, see --memory of up",
        "the program reached its container's memory limit",
        "a larger `--memory`, `--micro-batches 4`, or a smaller batch; `invoke plan` estimates",
        "--memory",
        EXIT_FAILED,
    ),
    Trouble(
        "no GPU",
        "--gpus ...: no GPU was found on this machine (...); install NVIDIA's driver, or use --gpus none",
        "no GPU, or no driver",
        "`nvidia-smi`; `invoke doctor`; `--gpus none`",
        "--gpus none",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "GPU image without a GPU",
        "TensorFlow sees 0 of 1 GPUs that were given to this task; its log says which library or driver is missing: "
        "mend that, or train with --gpus none",
        "the container has no GPU: the engine lacks NVIDIA's Container Toolkit, or the driver is too old",
        "`invoke doctor`, which tries a container; [gpus.md](gpus.md)",
        "--gpus none",
        EXIT_PREREQUISITE,
    ),
)


LATER = (
    Trouble(
        "a task never came up",
        "the cluster was not complete after ... s: missing worker-0 (...)",
        "the parenthesis says whether its name resolves, whether anything listens, and the task's last line",
        "`invoke logs worker-0`; `BARRIER_TIMEOUT_S` sets the bound",
        "",
        EXIT_TIMEOUT,
    ),
    Trouble(
        "another command at work",
        "run '...' is being started by process ...; wait for it or interrupt it, then try again",
        "that command holds the claim on the run; the claim ends with its process",
        "wait for it, or interrupt that process",
        "interrupt it",
        EXIT_USAGE,
    ),
    Trouble(
        "engine gone at the end",
        "...: in containers, which may go on: no Docker Engine answers (...); start the engine, then `invoke down` "
        "again",
        "`down` ended what is in processes, and cannot reach what is in containers",
        "start the engine, then `invoke down` again",
        "invoke down",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "engine that hangs",
        "'...docker compose ...' did not end in ... s and was killed; see whether `docker info` answers",
        "the engine hangs",
        "`docker info`; restart the engine, then `invoke down`",
        "docker info",
        EXIT_TIMEOUT,
    ),
    Trouble(
        "no source of the data",
        "no source has fashion_mnist-...: ...Connect this machine to one of them, or copy the folder ... from a "
        "machine that has it.",
        "no source answers: no internet, and no Debian mirror",
        "run `invoke data.prepare` where there is one, and copy `data/`",
        "copy the folder",
        EXIT_PREREQUISITE,
    ),
    Trouble(
        "loss that is no number",
        "loss is nan at step ...",
        "the step size is too large, or an input is broken",
        "lower `--optimizer.learning-rate`; checkpoints before that step are kept",
        "",
        EXIT_FAILED,
    ),
    Trouble(
        "task off its network",
        "... cannot listen on ...: ...; is this machine on the cluster's network?",
        "the task's own name does not resolve to an address of this machine, for the whole rendezvous",
        "repair the network, then `up --resume`",
        "network",
        EXIT_TIMEOUT,
    ),
    Trouble(
        "port of a task taken",
        "... cannot listen on ...: Address already in use; end the program that holds port ... and start again",
        "another program used the task's port during the whole rendezvous",
        "the line says how to find it; end it, then `up --resume`",
        "end the program",
        EXIT_FAILED,
    ),
    Trouble(
        "failure again and again",
        "failed 4 times without progress after step ...: ...",
        "the program keeps failing at the same step",
        "the end of the line is the program's own error; `invoke logs TASK`",
        "",
        EXIT_FAILED,
    ),
    Trouble(
        "program that leaves",
        "ended with exit code 0 before it was done",
        "something ended the training program, such as `sys.exit()` in a callback",
        "let Keras end it: `model.stop_training = True`",
        "",
        EXIT_FAILED,
    ),
    Trouble(
        "somebody else's run",
        "run '...' was not started by you on this machine: ...; add --trust if you trust its author",
        "it was copied or renamed, or somebody else started it",
        "`--trust`, if you trust its author; `up --resume RUN --trust` records it as yours",
        "--trust",
        EXIT_USAGE,
    ),
    Trouble(
        "tasks that others can reach",
        "warning: TensorFlow's servers ask for no password, and whoever reaches this machine reaches them: ...",
        "local tasks are in the machine's network; the line says why",
        "follow its advice, or use containers or a firewall; [security.md](../reference/security.md)",
        "",
        EXIT_DONE,
    ),
    Trouble(
        "damaged record",
        "...cluster.json is damaged: ...; restore it, or remove it",
        "the disk was full, the power failed, or a task wrote there",
        "restore the file, or start the run again with `--fresh`; `invoke down RUN` ends what runs of it",
        "restore it",
        EXIT_FAILED,
    ),
)
TROUBLES = FIRST_HOUR + LATER


def page() -> list[str]:
    """Return both tables in Markdown."""
    return ["## The first hour", "", *table(FIRST_HOUR), "", "## Later", "", *table(LATER)]


def table(troubles: Sequence[Trouble]) -> list[str]:
    """Return rows as a table in Markdown."""
    rows = [f"| `{each.sees.replace('`', '')}` | {each.why} | {each.fix} |" for each in troubles]
    return ["| what you see | why | what to do |", "|---|---|---|", *rows]

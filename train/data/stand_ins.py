"""Stand-ins for TensorFlow and Keras while a user's data function is called, until it uses one of them.

Their import takes seconds, and most functions need none of it: their module imports them for the model alone. So the
first use of one, other than to name a part of it or to derive a class, runs the program again as a new process with the
real modules. An error may be due to a stand-in, so it does the same. A fork of `up` has the real modules; there the
first computation runs the program again, as it would use the kernels of the run, on which the data must not depend.
"""

import contextlib
import importlib.machinery
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from cluster.contract import user_code

NAMES = ("tensorflow", "keras", "tf_keras")
REAL = "WITH_TENSORFLOW"
"""The environment variable that requests the real modules."""
OPERATIONS = (
    *("call", "instancecheck", "subclasscheck", "delattr", "dir", "enter"),
    *("eq", "ne", "hash", "bool", "repr", "str", "format", "or", "ror", "index", "int", "float"),
    *("len", "iter", "contains", "getitem", "setitem"),
)
"""Those of which Python has a default, or which a user's function may catch the lack of; others raise an error."""


class StandIn(ModuleType):
    """A module or a part of one; any operation on it but the access to its parts calls `use`."""

    def __init__(self, name: str, use: Callable[..., NoReturn]) -> None:
        super().__init__(name)
        self.__dict__["_use"] = use

    def __getattr__(self, name: str) -> Any:
        if name in ("__path__", "__file__", "__cached__"):  # an import asks for these first
            raise AttributeError(name)
        if name.startswith("__"):
            self._use()
        return self.__dict__.setdefault(name, StandIn(f"{self.__name__}.{name}", self._use))

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return ()

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__") and not isinstance(value, StandIn):  # as the import does
            self._use()
        self.__dict__[name] = value


for _operation in OPERATIONS:
    setattr(StandIn, f"__{_operation}__", lambda self, *_, **__: self._use())


class _Finder:
    """Finds stand-ins for the installed modules among `NAMES`, and for all of their submodules."""

    def __init__(self, use: Callable[..., NoReturn]) -> None:
        self._use = use
        self.found = False

    def find_spec(self, name: str, *_: object) -> Any:
        top = name.partition(".")[0]
        if top not in NAMES or (name == top and not importlib.machinery.PathFinder.find_spec(top)):
            return None
        self.found = True
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name, self._use)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in is complete."""


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Context manager that installs the stand-ins, in a program of `user_code.run` that has not been run again for it.

    A child of this process that uses one fails, and the program runs again at the end of the context.
    """
    if os.environ.pop(REAL, None) or user_code.RESULT_FILE not in os.environ:
        yield
        return
    command, folder, environment = [sys.executable, "-m", "train.data", *sys.argv[1:]], Path.cwd(), dict(os.environ)
    process = os.getpid()
    used = mmap.mmap(-1, 1)  # shared with children

    def use(*_: object) -> NoReturn:
        if os.getpid() != process:
            used[0] = 1
            raise ImportError("a process that the data function has forked cannot use TensorFlow")
        with contextlib.suppress(Exception):  # closed by the function
            sys.stdout.flush()
            sys.stderr.flush()
        os.chdir(folder)
        os.execve(sys.executable, command, environment | {REAL: "1"})  # noqa: S606

    finder = _Finder(use)
    fork = sys.modules.get("tensorflow.python.eager.context")
    if fork:
        initialize, fork.Context.ensure_initialized = fork.Context.ensure_initialized, use
    else:
        sys.meta_path.insert(0, finder)
    try:
        yield
    except BaseException:
        if finder.found:
            use()
        raise
    if used[0]:
        use()
    if fork:
        fork.Context.ensure_initialized = initialize
        return
    sys.meta_path.remove(finder)
    for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
        del sys.modules[name]

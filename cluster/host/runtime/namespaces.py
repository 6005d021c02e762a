"""Network namespaces: a loopback device that other processes of the machine cannot reach, and no other network.

Files, process ids and signals remain those of the machine.
"""

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_FLAGS = "16sh22x"
"""`struct ifreq` with an interface's name and flags."""
_SYSCTL = Path("/proc/sys")
_FORBIDDING = {
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "user.max_user_namespaces": ("0", "10000"),
    "user.max_net_namespaces": ("0", "10000"),
}
"""Kernel settings that can forbid namespaces to non-root users: the forbidding value and an allowing one."""
_CONTAINED = "the container around it needs CAP_SYS_ADMIN for that; start the run outside of it"


@dataclass(frozen=True)
class Refusal:
    """The reason why a process cannot enter a network namespace here, and a fix."""

    why: str
    fix: str


def enter() -> None:
    """Move this process, which must be single-threaded, and its future children to a new network namespace.

    Users other than root also need a user namespace, in which they keep their id, so that files keep their owner.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")  # required before the group map is written, unless by root
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _bring_up("lo")


def refusal() -> Refusal | None:
    """Return why a child process cannot enter a network namespace here, and a fix; None if it can."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C would print a traceback of the child
    child = os.fork()
    if not child:
        os._exit(_try())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return _explain(code) if code else None


def _try() -> int:
    """Enter a network namespace and use its loopback device; return the error number, 0 on success."""
    try:
        enter()
        # UDP only looks up the route; TCP would take ten times as long.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))
        return 0
    except OSError as error:
        return error.errno or errno.EINVAL
    except BaseException:
        return errno.EINVAL


def _explain(code: int) -> Refusal:
    for name, (forbids, allows) in _FORBIDDING.items():
        setting = _SYSCTL / name.replace(".", "/")
        if setting.exists() and setting.read_text().strip() == forbids:
            return Refusal(f"{name} is {forbids}", f"`sysctl -w {name}={allows}` as root allows it")
    if code < 0 or _filtered():
        return Refusal("system calls are filtered", _CONTAINED)
    return Refusal(f"the kernel says {os.strerror(code)!r}", "user_namespaces(7) says when it does")


def _filtered() -> bool:
    return "\nSeccomp:\t2\n" in Path("/proc/self/status").read_text()


def _unshare(what: int) -> None:
    if _LIBC.unshare(what):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _bring_up(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as request:
        answer = fcntl.ioctl(request, _SIOCGIFFLAGS, struct.pack(_FLAGS, interface.encode(), 0))
        _, flags = struct.unpack(_FLAGS, answer)
        fcntl.ioctl(request, _SIOCSIFFLAGS, struct.pack(_FLAGS, interface.encode(), flags | _IFF_UP))

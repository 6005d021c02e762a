"""Reachability of ports: the addresses of this machine, and whether a TensorFlow server answers at one.

Standard library only. As a program in other containers, it prints which of its arguments, ADDRESS PORT pairs, have a
server that answers.
"""

import fcntl
import socket
import struct
import sys
from pathlib import Path

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes that a gRPC client sends."""
OWN_SETTING = b"\xfe\x03\0\0\0\1"
"""A setting that only gRPC servers, such as TensorFlow's, send: some gateways answer for any address."""
GREETING = bytes([0, 0, len(OWN_SETTING), 4, 0, 0, 0, 0, 0]) + OWN_SETTING
"""The start of a gRPC server's first frame, reduced to this setting."""
SIOCGIFADDR = 0x8915


def speaks(address: str, port: int, timeout_s: float = 2) -> bool:
    """Whether a gRPC server answers at an address."""
    try:
        with socket.create_connection((address, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(HELLO)
            return OWN_SETTING in connection.recv(512)
    except OSError:
        return False


def addresses() -> list[str]:
    """Return every address of this machine's interfaces, including loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    if (listed := Path("/proc/net/if_inet6")).exists():
        for line in listed.read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            shown = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
            found.append(f"{shown}%{name}" if scope == "20" else shown)
    return found


if __name__ == "__main__":
    given = sys.argv[1:]
    for address, port in zip(given[::2], given[1::2], strict=True):
        if speaks(address, int(port)):
            print(address, port)

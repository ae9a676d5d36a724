"""The socket in an open store's folder. Over this socket, processes of the same user send requests to the lock holder.

A message is one JSON document in one packet of a Unix socket (SOCK_SEQPACKET). A packet's size is limited; it arrives
whole or not at all. A longer answer is split into several packets; all except the last begin with a zero byte. The
client sends the first message, called the request. docs/cli.md lists requests and answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

from ...engine.errors import undo_on_error

SOCKET = "SOCKET"
MAX_PACKET_BYTES = 1 << 16  # bytes per packet
MAX_PACKETS = 1024  # packets per answer

_MORE = b"\0"  # the first byte of a packet whose message continues in the next packet
_BACKLOG = 64  # how many clients may wait to be accepted

Message = dict[str, Any]


def open_folder_fd(path: Path) -> int:
    """Open a file descriptor for a folder. The caller must close it. Raises OSError."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY)


def listen(folder_fd: int) -> socket.socket:
    """Listen on a new socket in the folder. First removes a socket that a killed process left. Raises OSError."""
    remove_socket(folder_fd)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with undo_on_error(listener.close):
        os.fchmod(listener.fileno(), 0o600)  # before `bind`, so the socket never has another mode
        listener.bind(_make_address(folder_fd))
        listener.listen(_BACKLOG)
    return listener


def remove_socket(folder_fd: int) -> None:
    """Remove the socket from the folder, if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=folder_fd)


def connect(path: Path, timeout: float) -> socket.socket | None:
    """Connect to the folder's socket. Returns None if no process listens. timeout: seconds per wait. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout)
        folder_fd = open_folder_fd(path)
        try:
            connection.connect(_make_address(folder_fd))
        finally:
            os.close(folder_fd)
    except BaseException as error:
        connection.close()
        if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):  # after a kill, a socket refuses to connect
            return None
        raise
    return connection


def read_peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Returns the id and the user id of the process at the other end of a connection. Raises OSError."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def send(connection: socket.socket, message: Message) -> None:
    """Send a message. Raises OSError if the message cannot be sent."""
    data = json.dumps(message).encode()
    while len(data) > MAX_PACKET_BYTES:
        connection.send(_MORE + data[: MAX_PACKET_BYTES - 1])
        data = data[MAX_PACKET_BYTES - 1 :]
    connection.send(data)


def receive(connection: socket.socket, packets: int = 1) -> Message | None:
    """Receive a message. Returns None at the connection's end. Raises OSError, and ValueError for bad messages."""
    data = b""
    for _ in range(packets):
        packet, _, flags, _ = connection.recvmsg(MAX_PACKET_BYTES)
        if not packet:
            return None
        if flags & socket.MSG_TRUNC:
            raise ValueError(f"a packet has more than {MAX_PACKET_BYTES} bytes")
        data += packet.removeprefix(_MORE)
        if not packet.startswith(_MORE):
            break
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the message is not JSON: {error or type(error).__name__}") from None
    if not isinstance(message, dict):
        raise ValueError("the message is not a JSON object")
    return message


def _make_address(folder_fd: int) -> str:
    # a socket's address has at most 108 bytes, and the folder's path may be longer
    return f"/proc/self/fd/{folder_fd}/{SOCKET}"

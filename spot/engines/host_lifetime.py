"""A host process must not outlive its gateway, and leaves nothing behind when it ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time

_GRACE_AFTER_HANGUP_S = 10.0


def end_with(connection: socket.socket, *, grace_s: float = _GRACE_AFTER_HANGUP_S) -> None:
    """Kill the process group soon after the gateway's end of `connection` is gone.

    The event loop notices as well and ends in order; this is for when it is blocked.
    """

    def watch() -> None:
        hangup = select.poll()
        hangup.register(connection.fileno(), select.POLLRDHUP)
        while not hangup.poll():
            pass
        time.sleep(grace_s)
        kill_own_group()

    threading.Thread(target=watch, name="gateway-watch", daemon=True).start()


def kill_own_group() -> None:
    """End this process and everything that it started, if it leads its process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)

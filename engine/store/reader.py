"""Reading an expert is one positioned read of its whole record, around the page cache unless that is asked for."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from engine.errors import ReadError

_CHUNK = 8 * 2**20  # a longer single direct read gains nothing and pins more kernel memory


class RecordReader:
    """Records of `record_bytes` bytes from `path`, from any thread.

    direct: whether reads really go around the page cache: O_DIRECT on Linux, F_NOCACHE on macOS. Where the file system
    refuses (tmpfs, some network ones) and on Windows reads are buffered, on Linux with the cached pages dropped behind.
    """

    def __init__(self, path: Path, record_bytes: int, page_cache: bool = False) -> None:
        self.path, self.record_bytes, self.page_cache = path, record_bytes, page_cache
        self.direct = False
        self._local = threading.local()
        self._files: list = []
        self._descriptor = -1
        if hasattr(os, "preadv"):
            self._descriptor = self._open()

    def _open(self) -> int:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        if not self.page_cache and hasattr(os, "O_DIRECT"):
            try:
                descriptor = os.open(self.path, flags | os.O_DIRECT)
                self.direct = True
                return descriptor
            except OSError:
                self.direct = False  # this file system has no direct I/O: buffered, with the cache dropped behind
        descriptor = os.open(self.path, flags)
        if not self.page_cache and sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
            self.direct = True
        return descriptor

    def read_into(self, index: int, target: memoryview) -> None:
        """Fill `target` (record_bytes long, page-aligned) with record `index`. Raises ReadError naming file and
        offset."""
        offset = index * self.record_bytes
        try:
            done = self._read(offset, target)
        except OSError as error:
            raise ReadError(f"cannot read {self.path} at byte {offset}: {error.strerror or error}; check the disk, then "
                            "load the model again") from error  # fmt: skip
        if done < self.record_bytes:
            raise ReadError(f"{self.path} ends at byte {offset + done}, inside record {index}: it was truncated; "
                            "prepare the model again")  # fmt: skip

    def _read(self, offset: int, target: memoryview) -> int:
        done = 0
        while done < self.record_bytes:
            part = target[done : done + _CHUNK]
            if self._descriptor >= 0:
                count = os.preadv(self._descriptor, [part], offset + done)
            else:
                file = self._thread_file()
                file.seek(offset + done)
                count = file.readinto(part)
            if not count:
                break
            done += count
        if self._descriptor >= 0 and not self.direct and not self.page_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, self.record_bytes, os.POSIX_FADV_DONTNEED)
        return done

    def _thread_file(self):
        """This thread's own file object, where there is no positioned read (Windows)."""
        if not hasattr(self._local, "file"):
            self._local.file = self.path.open("rb", buffering=0)
            self._files.append(self._local.file)
        return self._local.file

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

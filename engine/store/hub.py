"""A hub source fetches one shard at a time, every file from the one commit it found when it was opened.

A file gets its name only after its content is proved: its size, and the sha256 (large files) or git object id
(small ones) that the hub gives as ETag. A download that was cut off goes on where it stopped, in a later
process too; huggingface_hub's own `hf_hub_download` starts over, and a shard of 5 GB is too large for that.
Endpoint, token and cache directory are huggingface_hub's: HF_ENDPOINT, HF_TOKEN, HF_HOME.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from filelock import FileLock, Timeout
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_session,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from engine.config import format_size
from engine.errors import SourceError
from engine.store.adapter import is_adapter
from engine.store.progress import Progress, ProgressCallback, check_cancelled
from engine.store.source import INDEX_FILE, read_index

_SMALL_FILES = re.compile(r"[^/\\]+\.(json|txt|model|jinja|tiktoken)|(LICENSE|NOTICE)[^/\\]*")
_WEIGHTS = re.compile(r"[^/\\]+\.safetensors")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors")
_PASSING = (408, 429, 500, 502, 503, 504)  # HTTP status codes worth another attempt
_ATTEMPTS = 5  # in a row without a single new byte
_CHUNK = 1 << 20  # bytes
_DISK_MARGIN = 64 << 20  # bytes


class HubSource:
    """The safetensors checkpoint `model_id` of the hub: `org/name`, or `org/name@revision`.

    Implements `engine.store.source.Source`. Only the shards that are open, not yet released, take disk space,
    in `config_dir` under HF_HOME; it stays after `close` only if it holds bytes that a later run can use. A
    shard that lies in huggingface_hub's cache is used from there and left there. Raises SourceError, naming
    the id and the way out, and CancelledError soon after `cancel` is set.
    """

    def __init__(
        self, model_id: str, progress: ProgressCallback | None = None, cancel: threading.Event | None = None
    ) -> None:
        self._report, self._cancel = progress or (lambda _: None), cancel or threading.Event()
        self._repo, _, revision = model_id.partition("@")
        self._released: set[str] = set()
        with _hub_errors(model_id):
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            info = HfApi().model_info(self._repo, revision=revision or None, timeout=timeout)
        self.revision = info.sha
        self.name = f"{self._repo}@{self.revision}"
        files = [sibling.rfilename for sibling in info.siblings or ()]
        if "config.json" not in files:
            raise SourceError(f"{model_id} has no config.json, so it is no model; choose another hub id")
        folder = f"{self._repo.replace('/', '--')}@{self.revision}"
        self.config_dir = Path(constants.HF_HOME) / "outrider" / folder
        with _disk_errors(self.config_dir):
            self.config_dir.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{self.config_dir}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise SourceError(f"{model_id} is being downloaded by another process; wait for it") from error
        try:
            for name in files:
                if _SMALL_FILES.fullmatch(name) or is_adapter(name):  # adapters are needed before the shards
                    self._fetch(name)
            self.shards = self._find_shards(files)
        except BaseException:
            self.close()
            raise

    def open_shard(self, name: str) -> Path:
        """The shard's local path, after downloading what is missing of it."""
        cached = try_to_load_from_cache(self._repo, name, revision=self.revision)
        return Path(cached) if isinstance(cached, str) else self._fetch(name)

    def release_shard(self, name: str) -> None:
        """Delete the downloaded shard, if there is one."""
        self._released.add(name)
        self._delete_released()

    def close(self) -> None:
        """Unlock the directory, and remove it unless it holds (parts of) shards for a later run."""
        self._delete_released()
        left = [path.suffix for path in self.config_dir.glob("*") if not is_adapter(path.name)]
        if ".safetensors" not in left and ".partial" not in left:
            shutil.rmtree(self.config_dir, ignore_errors=True)
        self._lock.release()

    def _delete_released(self) -> None:
        for name in sorted(self._released):
            try:
                (self.config_dir / name).unlink(missing_ok=True)
            except PermissionError:  # Windows, while a tensor still maps the file: the next call tries again
                continue
            self._released.remove(name)

    def _find_shards(self, files: list[str]) -> list[str]:
        if INDEX_FILE in files:
            shards = sorted(set(read_index(self.config_dir / INDEX_FILE).values()))
            wrong = next((name for name in shards if name not in files or not _is_shard(name)), None)
            if wrong:
                raise SourceError(f"{self.name} lacks {wrong}, which its index names; choose another hub id")
            return shards
        shards = sorted(name for name in files if _is_shard(name))
        if not shards:
            found = next((name for name in files if name.endswith(_OTHER_WEIGHTS)), "none at all")
            raise SourceError(
                f"{self.name} has no safetensors weights in its main folder (found: {found}); "
                "choose a hub id that has them, or convert the checkpoint and give its local folder"
            )
        return ["model.safetensors"] if "model.safetensors" in shards else shards

    def _fetch(self, name: str) -> Path:
        """Download the file `name` of the pinned commit unless it is here, and return its path."""
        path = self.config_dir / name
        if path.is_file():  # checked before it got this name
            return path
        partial = path.with_name(name + ".partial")
        with _disk_errors(path), _hub_errors(self.name):
            url = hf_hub_url(self._repo, name, revision=self.revision)
            metadata = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, retry_on_errors=True)
            if metadata.commit_hash != self.revision:
                sent = metadata.commit_hash
                raise SourceError(f"{name} of {self.name}: the hub sends commit {sent}; check HF_ENDPOINT")
            self._download(url, partial, metadata.size, f"downloading {name}")
            _verify(partial, f"{name} of {self.name}", metadata.size, metadata.etag)
            partial.replace(path)
        return path

    def _download(self, url: str, partial: Path, size: int | None, stage: str) -> None:
        """Fill `partial` up to `size` bytes (None: to the server's end of file), across lost connections."""
        failures, have = 0, _size(partial)
        if size is not None:
            _check_disk(partial, size - have)
        while have != size:
            try:
                self._receive(url, partial, have, size, stage)
                if size is None:
                    return
            except (httpx2.TransportError, HfHubHTTPError) as error:
                failures = 1 if _size(partial) > have else failures + 1
                final = isinstance(error, HfHubHTTPError) and error.response.status_code not in _PASSING
                if final or failures == _ATTEMPTS:
                    raise
                self._cancel.wait(2.0 ** (failures - 1))
            have = _size(partial)
            if size is not None and have > size:
                return  # _verify says so

    def _receive(self, url: str, partial: Path, start: int, size: int | None, stage: str) -> None:
        """Append what the server has from byte `start` on; from 0 on when it does not know ranges."""
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            resumed = response.status_code == 206
            done = start if resumed else 0
            with partial.open("ab" if resumed else "wb") as file:
                for chunk in response.iter_bytes(_CHUNK):
                    check_cancelled(self._cancel)
                    file.write(chunk)
                    done += len(chunk)
                    self._report(Progress(stage, done, size or done, "bytes"))
                file.flush()
                os.fsync(file.fileno())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _verify(path: Path, what: str, size: int | None, etag: str | None) -> None:
    """Check a whole file against the hub's size and ETag; one that differs is deleted. Raises SourceError."""
    expected = found = f"{_size(path)} bytes"
    if size is not None and size != _size(path):
        expected = f"{size} bytes"
    elif etag and re.fullmatch(r"[0-9a-f]{64}", etag):
        expected, found = f"sha256 {etag}", f"sha256 {_digest(path, hashlib.sha256())}"
    elif etag and re.fullmatch(r"[0-9a-f]{40}", etag):  # a git object id hashes this header, then the content
        header = f"blob {_size(path)}\0".encode()
        expected, found = f"git id {etag}", f"git id {_digest(path, hashlib.sha1(header))}"
    if found != expected:
        path.unlink()
        raise SourceError(f"{what} is damaged: expected {expected}, found {found}; it was deleted, run again")


def _digest(path: Path, hasher) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _check_disk(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed + _DISK_MARGIN:
        raise SourceError(
            f"not enough disk to download {path.stem}: it needs {format_size(needed)} and {path.parent} has "
            f"{format_size(free)}; free some space or set HF_HOME to a folder on another disk"
        )


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"cannot write {path}: {error.strerror or error}; free some space or set HF_HOME to a folder on "
            "another disk, then run again: the download goes on where it stopped"
        ) from error


@contextmanager
def _hub_errors(model_id: str) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP client raise into a SourceError that says what to do."""
    hub = constants.ENDPOINT
    login = "if access to it is limited, log in (`hf auth login`) or set HF_TOKEN"
    again = "then run again: the download goes on where it stopped"
    try:
        yield
    except GatedRepoError as error:
        raise SourceError(f"{model_id} is gated: accept its terms on {hub}, then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{model_id}: no such revision on {hub}; leave out what follows @") from error
    except RepositoryNotFoundError as error:  # for private ones, too
        raise SourceError(f"{model_id} is not on {hub}: check its name; {login}") from error
    except EntryNotFoundError as error:
        raise SourceError(f"{model_id} lacks a file on {hub} ({_line(error)})") from error
    except HFValidationError as error:
        raise SourceError(f"'{model_id}' is no hub id, write org/name ({_line(error)})") from error
    except OfflineModeIsEnabled as error:
        raise SourceError(f"{model_id} cannot be downloaded: HF_HUB_OFFLINE is set; unset it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = f"check its name; {login}" if status in (401, 403) else f"wait a while, {again}"
        raise SourceError(f"{model_id}: {hub} answered with HTTP status {status}; {remedy}") from error
    except httpx2.HTTPError as error:
        raise SourceError(
            f"{model_id}: cannot reach {hub} ({_line(error)}); check the internet connection, {again}"
        ) from error
    except ValueError as error:
        raise SourceError(f"{model_id}: {hub} does not answer as a hub does; check HF_ENDPOINT") from error


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_shard(name: str) -> bool:
    """Whether a file of this name in a repository holds weights of the model itself."""
    return _WEIGHTS.fullmatch(name) is not None and not is_adapter(name)

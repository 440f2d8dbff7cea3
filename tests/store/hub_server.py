"""A model hub on loopback: as much of the hub's HTTP protocol as a download needs, with faults on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "c0ff"
LARGE = ".safetensors"  # their ETag is the sha256, other files' the git object id, as on the hub


@dataclass
class Repository:
    """One model. files: name -> content. token: needed to read it. The rest are faults, by file name."""

    files: dict[str, bytes]
    token: str = ""
    gated: bool = False
    commit: str = COMMIT
    cut: dict[str, int] = field(default_factory=dict)  # close the connection once after this many bytes
    status: dict[str, list[int]] = field(default_factory=dict)  # answer these HTTP errors first
    corrupt: set[str] = field(default_factory=set)  # flip a byte
    ranges: bool = True  # whether the Range header is obeyed


class HubServer:
    """Serves `repositories` (id -> Repository) and records every request as (method, path, range)."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def downloads(self, name: str) -> list[str | None]:
        """The Range header of every GET of the file `name`, in order."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith("/" + name)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: object) -> None:
        """Tests read `HubServer.requests`."""

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, send_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repository = self.hub.repositories.get(match[1]) if match else None
        if repository is None:
            return self._error(401, "", "Invalid username or password.")  # as the hub says of what it hides
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository.token and token != repository.token:
            if repository.gated:
                return self._error(403 if token else 401, "GatedRepo", "Access to this model is restricted.")
            if token:
                return self._error(401, "", "Invalid credentials in Authorization header")
            return self._error(401, "RepoNotFound", "Repository not found")
        if match[2] not in (None, "main", repository.commit):
            return self._error(404, "RevisionNotFound", "Invalid rev id")
        if api:
            siblings = [{"rfilename": name} for name in repository.files]
            answer = {"id": match[1], "sha": repository.commit, "siblings": siblings}
            return self._send(200, json.dumps(answer).encode())
        self._send_file(repository, file[3], send_body)

    def _send_file(self, repository: Repository, name: str, send_body: bool) -> None:
        if name not in repository.files:
            return self._error(404, "EntryNotFound", "Entry not found")
        if send_body and repository.status.get(name):
            return self._error(repository.status[name].pop(0), "", "fault")
        content = repository.files[name]
        if name.endswith(LARGE):
            etag = hashlib.sha256(content).hexdigest()
        else:
            etag = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if name in repository.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        start, total = 0, len(content)
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if span and repository.ranges:
            start = int(span[1])
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        body = content[start:]
        self.send_response(206 if "Content-Range" in headers else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not send_body:
            return
        cut = repository.cut.pop(name, None)
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, message.encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            if value:
                self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

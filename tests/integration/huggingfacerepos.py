"""A local server that takes commits as the Hugging Face hub does, on its good and its bad days.

What the client library uses of the hub: making a repository, listing its files, asking how to upload (`preupload`),
git-LFS for large files, and a commit in lines of JSON. Everything needs a token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_writer"
READER = "hf_reader"


class Repositories(ThreadingHTTPServer):
    """The server, and what it has been given."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.objects: dict[str, bytes] = {}  # of git-LFS, by SHA-256
        self.num_uploads = 0
        self.bad_days: list[tuple[str, int]] = []  # a part of a path, and the status that its next request gets
        self.asked: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fail(self, part: str, *statuses: int) -> None:
        """Answer the next requests so whose path has this part."""
        self.bad_days += [(part, status) for status in statuses]

    def bad_day(self, path: str) -> int | None:
        with self.lock:
            for day in self.bad_days:
                if day[0] in path:
                    self.bad_days.remove(day)
                    return day[1]
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Repositories

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    def _handle(self, method: str) -> None:
        path = self.path.partition("?")[0]
        body = self._body()
        self.server.asked.append(f"{method} {path}")
        bad = self.server.bad_day(path)
        if bad is not None:
            self._answer(bad, {"error": "not today"})
        elif path.startswith("/objects/"):
            self._take_object(path.removeprefix("/objects/"), body)
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            known = self.headers.get("Authorization") == f"Bearer {READER}"
            self._answer(403 if known else 401, {"error": "this token may not write"})
        else:
            self._route(method, path, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = []
            while length := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _route(self, method: str, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":  # a model card's
            self._answer(200, {"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/(\w+/\w+)/(tree|revision)/main", path):
            self._describe(match[1], match[2])
        elif match := re.fullmatch(r"/api/models/(\w+/\w+)/preupload/main", path):
            self._preupload(json.loads(body))
        elif re.fullmatch(r"/\w+/\w+\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif match := re.fullmatch(r"/api/models/(\w+/\w+)/commit/main", path):
            self._commit(match[1], body)
        else:
            self._answer(404, {"error": f"{method} {path} is unknown here"})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'somebody'}/{wanted['name']}"
        if name in self.server.files:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"})
            return
        self.server.files[name] = {}
        self._answer(200, {"url": f"{self.server.url}/{name}", "name": name, "id": "1"})

    def _describe(self, name: str, what: str) -> None:
        files = self.server.files[name]
        if what == "tree":
            self._answer(200, [{"type": "file", "path": p, "size": len(d), "oid": "0" * 40} for p, d in files.items()])
        else:
            siblings = [{"rfilename": path} for path in files]
            self._answer(200, {"id": name, "modelId": name, "sha": "0" * 40, "siblings": siblings, "private": False})

    def _preupload(self, wanted: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in wanted["files"]
        ]
        self._answer(200, {"files": files})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for one in wanted["objects"]:
            entry: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.server.objects:
                entry["actions"] = {"upload": {"href": f"{self.server.url}/objects/{one['oid']}"}}
            objects.append(entry)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _take_object(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": "the content is not what its name says"})
            return
        self.server.objects[oid] = body
        self.server.num_uploads += 1
        self._answer(200, {})

    def _commit(self, name: str, body: bytes) -> None:
        files = dict(self.server.files[name])
        title = ""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                title = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        self.server.files[name] = files
        self.server.commits.append(title)
        oid = f"{len(self.server.commits):040d}"
        self._answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{name}/commit/{oid}"})

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "1")
        if status in (401, 403):
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def repositories() -> Iterator[Repositories]:
    """The server, running in a thread."""
    with Repositories() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="repositories")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

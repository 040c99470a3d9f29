"""A Hugging Face hub on loopback, for the real client: models and data sets with revisions.

Tests add them with `push`, and the client itself with uploads of models: regular files in a commit, weights by LFS.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

Kind = Literal["model", "dataset"]
Files = Mapping[str, bytes]


@dataclass
class Repository:
    """A repository: the files of each commit, and the commit of each branch. `gated`: only its name may be read."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit_of(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class Hub:
    """The hub at `url`.

    requests: the method and path of each request, and `RANGE START NAME` of each resumed download, in order.
    status: that of every answer, if not 200.
    breaks: the file whose next download breaks in its middle, and the status of every answer from then on.
    token: the one whose owner may write. private: by repository, what the client that created it has asked for.
    messages: those of the client's commits.
    """

    def __init__(self) -> None:
        self.repositories: dict[tuple[Kind, str], Repository] = {}
        self.requests: list[str] = []
        self.status = 200
        self.breaks: tuple[str, int] | None = None
        self.token = "hf_secret"
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.uploads: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def push(self, name: str, files: Files, *, kind: Kind = "model", branch: str = "main", gated: bool = False) -> str:
        """Add a commit to a repository and move the branch to it; return the commit."""
        content = {".gitattributes": b"*.safetensors filter=lfs\n", **files}
        repository = self.repositories.setdefault((kind, name), Repository())
        repository.gated = gated
        number = f"{kind} {name} {len(repository.commits)}"
        commit = hashlib.sha1(number.encode()).hexdigest()
        repository.commits[commit] = content
        repository.branches[branch] = commit
        return commit

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded, in order."""
        return [line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line]

    def close(self) -> None:
        """Stop serving, so that the hub cannot be reached."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._write()

        def do_PUT(self) -> None:
            self._write()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            if hub.status != 200:
                return self._send(hub.status, b"")
            parts = path.strip("/").split("/")
            if parts[0] == "api":
                kind: Kind = "dataset" if parts[1] == "datasets" else "model"
                name, rest = "/".join(parts[2:4]), parts[4:]
            else:
                kind = "dataset" if parts[0] == "datasets" else "model"
                parts = parts[kind == "dataset" :]
                name, rest = "/".join(parts[:2]), parts[2:]
            repository = hub.repositories.get((kind, name))
            if repository is None:
                return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            commit = repository.commit_of(rest[1] if len(rest) > 1 else "main")
            if commit is None:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = repository.commits[commit]
            if rest[:1] == ["resolve"]:
                return self._file(repository, commit, files, "/".join(rest[2:]))
            if rest[:1] == ["tree"]:
                listed = [
                    {"type": "file", "path": each, "size": len(content), "oid": _etag(content)}
                    for each, content in files.items()
                ]
                return self._send(200, json.dumps(listed).encode())
            info = {"id": name, "sha": commit, "siblings": [{"rfilename": each} for each in files]}
            return self._send(200, json.dumps(info).encode())

        def _write(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if hub.status != 200:
                return self._send(hub.status, b"")
            parts = path.strip("/").split("/")
            if self.command == "PUT":
                hub.uploads[parts[-1]] = body
                return self._send(200, b"")
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._send(403, b"")
            return self._send(200, json.dumps(self._written(parts, body)).encode())

        def _written(self, parts: list[str], body: bytes) -> object:
            """Do what a POST asks for, and return the answer."""
            if parts[:3] == ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                hub.repositories.setdefault(("model", name), Repository())
                hub.private.setdefault(name, asked.get("visibility") == "private")
                return {"url": f"{hub.url}/{name}", "name": name}
            if parts[-1] == "batch":
                objects = json.loads(body)["objects"]
                places = [{**each, "actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}} for each in objects]
                return {"transfer": "basic", "objects": places}
            if parts[4:5] == ["preupload"]:
                files = [each["path"] for each in json.loads(body)["files"]]
                mode = {each: "lfs" if each.endswith(".safetensors") else "regular" for each in files}
                return {"files": [{"path": each, "uploadMode": mode[each], "shouldIgnore": False} for each in files]}
            if parts[4:5] == ["commit"]:
                lines = [json.loads(line) for line in body.splitlines()]
                hub.messages.append(lines[0]["value"]["summary"])
                values = {line["value"]["path"]: line["value"] for line in lines[1:]}
                name = "/".join(parts[2:4])
                commit = hub.push(name, {path: self._content(value) for path, value in values.items()})
                return {"commitUrl": f"{hub.url}/{name}/commit/{commit}", "commitOid": commit}
            return {}  # a check of the card

        def _content(self, value: Mapping[str, str]) -> bytes:
            if "content" in value:
                return base64.b64decode(value["content"])
            content = hub.uploads[value["oid"]]
            assert hashlib.sha256(content).hexdigest() == value["oid"]
            return content

        def _file(self, repository: Repository, commit: str, files: Files, name: str) -> None:
            if repository.gated:
                return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            if name not in files:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            content = files[name]
            headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if self.command == "GET" and hub.breaks is not None and hub.breaks[0] == name:
                hub.status, hub.breaks = hub.breaks[1], None
                return self._send(200, content, headers, sent=len(content) // 2)
            if wanted := self.headers.get("Range"):
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                hub.requests.append(f"RANGE {start} {name}")
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                return self._send(206, content[start:], headers)
            return self._send(200, content, headers)

        def _send(
            self, status: int, body: bytes, headers: Mapping[str, str] | None = None, sent: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:sent])

    return Handler


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()

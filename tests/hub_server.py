"""A Hub on the loopback device: as much of its protocol as the real client needs to publish and to load models."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"
LARGE = (".safetensors", ".bin")


class Hub:
    """Repositories in memory: name → private or not, commits and branches. `with Hub() as hub` runs the server.

    Names of kernel repositories begin with `kernels/`.

    `cut` holds starts of requests, such as "POST /api": the connection of the next one of each is cut, without an
    answer or, where it asks for a file, in the middle of it.
    """

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.branches: dict[str, dict[str, list[str]]] = {}  # repository → branch → commits, oldest first
        self.commits: dict[str, dict[str, bytes]] = {}  # commit → files
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.requests: list[str] = []
        self.cut: list[str] = []

    def __enter__(self) -> "Hub":
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a branch or commit; KeyError where there is none."""
        return self.commits[self.commit(repository, revision)]

    def commit(self, repository: str, revision: str) -> str:
        branches = self.branches[repository]
        if revision in branches:
            return branches[revision][-1]
        if any(revision in commits for commits in branches.values()):
            return revision
        raise KeyError(revision)

    def add(self, repository: str, branch: str, files: dict[str, bytes]) -> str:
        """A new commit of a branch."""
        commit = hashlib.sha1(f"{repository} {branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = files
        self.branches[repository][branch].append(commit)
        return commit


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        self.cut = next((start for start in hub.cut if hub.requests[-1].startswith(start)), None)
        if self.cut:
            hub.cut.remove(self.cut)
            self.close_connection = True
            if self.command != "GET":
                return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            return self._answer(401, {"error": "Invalid username or password."})
        parts = path.strip("/").split("/")
        try:
            self._route(parts, body, token)
        except KeyError as error:
            self._answer(404, {"error": "Not found"}, {"X-Error-Code": self._missing(parts, error)})

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        chunk = self.rfile.read(size)
        self.rfile.readline()
        return chunk

    def _repository(self, parts: list[str]) -> tuple[str, list[str]]:
        """The repository that a path is about, and what of it."""
        if parts[0] == "api":
            parts = parts[2:] if parts[1] == "models" else parts[1:]
        end = 3 if parts[0] == "kernels" else 2
        return "/".join(parts[:end]).removesuffix(".git"), parts[end:]

    def _missing(self, parts: list[str], error: KeyError) -> str:
        if error.args[0] == self._repository(parts)[0]:
            return "RepoNotFound"
        return "EntryNotFound" if "." in error.args[0] else "RevisionNotFound"

    def _route(self, parts: list[str], body: bytes, token: str) -> None:
        hub = self.hub
        if parts[0] == "large":
            if self.command == "PUT":
                hub.large[parts[1]] = body
            elif len(hub.large[parts[1]]) != json.loads(body)["size"]:
                return self._answer(400, {"error": "size"})
            return self._answer(200, {})
        if parts[:2] == ["api", "validate-yaml"]:
            errors = [{"message": '"license" must be one of a list'}] if b"license: unheard-of" in body else []
            return self._answer(400 if errors else 200, {"errors": errors, "warnings": []})
        if self.command in ("POST", "PUT") and token != TOKEN:
            return self._answer(401, {"error": "Invalid username or password."})
        if parts == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        repository, rest = self._repository(parts)
        if repository not in hub.private or (hub.private[repository] and token != TOKEN):
            raise KeyError(repository)
        if rest[-1:] == ["batch"]:
            objects = [self._upload(entry) for entry in json.loads(body)["objects"]]
            return self._answer(200, {"transfer": "basic", "objects": objects})
        if parts[0] != "api":
            return self._file(hub.commit(repository, rest[1]), "/".join(rest[2:]))
        if rest == ["refs"]:
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commits[-1]}
                for name, commits in hub.branches[repository].items()
            ]
            return self._answer(200, {"branches": branches, "converts": [], "tags": []})
        action, revision, *place = rest or ("revision", "main")
        if action == "xet-write-token":
            return self._answer(403, {"error": "Xet storage is not for this repository."})
        if action == "preupload":
            files = [self._mode(entry) for entry in json.loads(body)["files"]]
            return self._answer(200, {"files": files})
        if action == "commit":
            return self._commit(repository, revision, [json.loads(line) for line in body.splitlines()])
        if action == "branch":
            if revision in hub.branches[repository]:
                return self._answer(409, {"error": "exists"})
            hub.branches[repository][revision] = list(hub.branches[repository]["main"])
            return self._answer(200, {})
        commit = hub.commit(repository, revision)
        if action == "tree":
            return self._answer(200, self._tree(hub.commits[commit], "".join(f"{name}/" for name in place)))
        siblings = [{"rfilename": name} for name in hub.commits[commit]]
        private = hub.private[repository]
        return self._answer(
            200, {"id": repository, "sha": commit, "private": private, "siblings": siblings, "tags": []}
        )

    def _tree(self, files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
        """What is in a folder, "" being that of all, and in its folders where that is asked."""
        inside = {name: data for name, data in files.items() if name.startswith(folder)}
        if "recursive=true" in urlsplit(self.path).query.lower():
            names, folders = set(inside), set()
        else:
            names = {name for name in inside if "/" not in name[len(folder) :]}
            folders = {folder + name[len(folder) :].split("/")[0] for name in inside if name not in names}
        return [
            *({"type": "directory", "path": name, "oid": _blob(name.encode())} for name in sorted(folders)),
            *(
                {"type": "file", "path": name, "size": len(inside[name]), "oid": _blob(inside[name])}
                for name in sorted(names)
            ),
        ]

    def _create(self, asked: dict[str, Any]) -> None:
        kind = "kernels/" if asked.get("type") == "kernel" else ""
        name = f"{kind}{asked.get('organization') or 'me'}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        if name in self.hub.private:
            return self._answer(409, url)
        self.hub.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.branches[name] = {"main": []}
        self.hub.add(name, "main", {".gitattributes": b""})
        return self._answer(200, url)

    def _mode(self, entry: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if entry["path"].endswith(LARGE) else "regular"
        return {"path": entry["path"], "uploadMode": mode, "shouldIgnore": False}

    def _upload(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["oid"] in self.hub.large:
            return entry
        place = {"href": f"{self.hub.url}/large/{entry['oid']}"}
        return {**entry, "actions": {"upload": place, "verify": place}}

    def _commit(self, repository: str, branch: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.files(repository, branch))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.add(repository, branch, files)
        self._answer(200, {"commitUrl": f"{self.hub.url}/{repository}/commit/{commit}", "commitOid": commit})

    def _file(self, commit: str, name: str) -> None:
        if name not in self.hub.commits[commit]:
            return self._answer(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = self.hub.commits[commit][name]
        etag = hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else _blob(data)
        return self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self._send(status, data, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        start = 0
        if status == 200 and (span := self.headers.get("Range")):
            start = int(span.removeprefix("bytes=").split("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[start : len(data) // 2] if self.cut else data[start:])


def _blob(data: bytes) -> str:
    """The name that git gives to these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

"""A server on this machine that speaks as much of the hub's protocol as ``datasets`` needs.

with Hub(folder) as hub:
    hub.use(monkeypatch)        # ``datasets`` of this process
    hub.environment             # the variables for other processes
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
import pytest

_POLL_SECONDS = 0.05

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of a folder as those of every dataset, at the commit ``COMMIT``.

    Attributes:
        held: the ends of the names of files that are not answered until they are removed from it.
            The client asks again after 10 seconds.
        answered: the files that were answered, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.held: set[str] = set()
        self.answered: list[str] = []
        self._folder = folder
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which another process uses this hub."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        return {"HF_ENDPOINT": address, "HF_HOME": str(self._home), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Use this hub in this process, and in those that it starts."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        address = self.environment["HF_ENDPOINT"]
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
        monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(self._home / "modules"))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(self._home / "hub"))
        huggingface_hub.HfFileSystem.clear_instance_cache()

    @property
    def _home(self) -> Path:
        return self._folder.with_name("hub_home")

    def _files(self) -> dict[str, int]:
        paths = sorted(path for path in self._folder.rglob("*") if path.is_file())
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in paths}

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        content = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(request.path).path)
        if "/resolve/" in path:
            self._answer_file(request, path.split("/resolve/")[1].partition("/")[2])
        elif "/paths-info/" in path:
            named = (
                json.loads(content)["paths"]
                if content[:1] == b"{"
                else parse_qs(content.decode())["paths"]
            )
            _send_json(request, [entry for entry in self._tree("", True) if entry["path"] in named])
        elif "/tree/" in path:
            below = path.split("/tree/")[1].partition("/")[2]
            is_deep = "recursive=true" in request.path.lower()
            _send_json(request, self._tree(below, is_deep))
        elif path.startswith("/api/datasets/"):
            siblings = [{"rfilename": name} for name in self._files()]
            facts = {"id": "/".join(path.split("/")[3:5]), "sha": COMMIT, "siblings": siblings}
            _send_json(request, {**facts, "private": False, "tags": []})
        else:
            _send(request, 404)

    def _tree(self, below: str, is_deep: bool) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for name, size in self._files().items():
            folders = Path(name).parents[:-1]
            for folder in folders:
                entries[str(folder)] = {"type": "directory", "oid": "0" * 40, "size": 0}
            entries[name] = {"type": "file", "oid": "1" * 40, "size": size}
        return [
            {"path": path, **entry}
            for path, entry in entries.items()
            if (is_deep or str(Path(path).parent) == (below or ".")) and path.startswith(below)
        ]

    def _answer_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        if name not in self._files():
            _send(request, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content, code = (self._folder / name).read_bytes(), 200
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"', "Accept-Ranges": "bytes"}
        if request.command != "HEAD":
            while name.endswith(tuple(self.held)):
                time.sleep(_POLL_SECONDS)
            self.answered.append(name)
        if (span := request.headers.get("Range")) is not None:
            first, last = span.removeprefix("bytes=").split("-")
            stop = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            content, code = content[int(first) : stop], 206
        _send(request, code, headers, content)


def _send_json(request: BaseHTTPRequestHandler, value: object) -> None:
    _send(request, 200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _send(
    request: BaseHTTPRequestHandler,
    code: int,
    headers: dict[str, str] | None = None,
    content: bytes = b"",
) -> None:
    request.send_response(code)
    for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)

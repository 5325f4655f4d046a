"""A W&B server on the loopback, as far as a run needs one: real HTTP, everything that is sent is kept."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "UHJvajox", "name": "scaling_lab", "entity": {"id": "RW50OjE=", "name": "ent"}}


@dataclass
class Server:
    """What was received, and how to misbehave towards whoever has shown a key.

    refuse: the status that requests are answered with, None for good answers; answering: while clear, nothing is answered
    """

    url: str = ""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    stream: list[dict[str, Any]] = field(default_factory=list)
    refuse: int | None = None
    answering: threading.Event = field(default_factory=threading.Event)

    def history(self) -> list[dict[str, Any]]:
        """Every row that arrived."""
        files = [message.get("files", {}).get("wandb-history.jsonl", {}).get("content", []) for message in self.stream]
        return [json.loads(line) for lines in files for line in lines]

    def exit_codes(self) -> list[int]:
        """The exit code of each run that was completed."""
        return [message["exitcode"] for message in self.stream if message.get("complete")]


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server on a free port, as long as the block runs."""
    server = Server()
    server.answering.set()
    http = _Http(("127.0.0.1", 0), _handler(server))
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.answering.set()
        http.shutdown()
        thread.join()
        http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients reset idle connections when they end."""


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = self._body()
            known = bool(self.headers.get("Authorization"))
            if known:
                server.answering.wait()
            if known and server.refuse:
                return self._reply({"errors": [{"message": "the key is not known"}]}, server.refuse)
            if self.path == "/graphql":
                asked = json.loads(body)
                return self._reply({"data": _answer(server, asked["query"], asked.get("variables") or {})})
            if self.path.endswith("/file_stream"):
                server.stream.append(json.loads(body))
                return self._reply({"exitcode": None, "limits": {}})
            self._reply({}, 404)

        def do_PUT(self) -> None:
            self._body()
            self._reply({})

        def do_GET(self) -> None:
            self._reply({}, 404)

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _reply(self, content: dict[str, Any], status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _answer(server: Server, query: str, variables: dict[str, Any]) -> dict[str, Any]:
    found = re.search(r"\b(?:query|mutation)\s+(\w+)", query)
    operation = found[1] if found else ""
    if operation == "UpsertBucket":
        return {"upsertBucket": _bucket(server, variables)}
    if operation == "CreateRunFiles":
        files = [{"name": name, "uploadUrl": f"{server.url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables.get("run"), "uploadHeaders": [], "files": files}}
    return {
        "Viewer": {"viewer": {"id": "VXNlcjox", "entity": "ent", "username": "u", "flags": "{}", "teams": {"edges": []}}},
        "ServerFeaturesQuery": {"serverInfo": {"features": []}},
        "OrganizationCoreWeaveOrganizationID": {"entity": {"organization": {"coreWeaveOrganizationId": None}}},
        "RunStoppedStatus": {"project": {"run": {"stopped": False}}},
    }.get(operation, {})


def _bucket(server: Server, variables: dict[str, Any]) -> dict[str, Any]:
    name = variables.get("name") or variables.get("id")
    is_new = name not in server.runs
    server.runs.setdefault(name, {}).update({key: value for key, value in variables.items() if value is not None})
    bucket = {
        "id": "UnVuOjE=",
        "name": name,
        "displayName": variables.get("displayName") or name,
        "description": None,
        "config": variables.get("config") or "{}",
        "sweepName": None,
        "project": PROJECT,
        "historyLineCount": 0,
    }
    return {"bucket": bucket, "inserted": is_new}

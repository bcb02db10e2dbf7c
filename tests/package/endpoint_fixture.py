"""An OpenAI-compatible server on this machine that answers as a test says, and badly if it says so."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def said(text: str | None, reason: str | None = "stop", tokens: int = 3) -> bytes:
    """A good answer, of either kind at once."""
    choice = {"index": 0, "finish_reason": reason, "text": text, "message": {"role": "assistant", "content": text}}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode()


class Server(ThreadingHTTPServer):
    """Answers as ``behave(prompt, times that it was asked before)`` says: bytes, a status with headers, or a deed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave: Callable[[str, int], object] = lambda prompt, before: said(f"<{prompt}>")
        self.models = ["the-model"]
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.flying = self.most = 0
        self.lock = threading.Lock()
        self.free = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_) -> None:
        """A client that hung up is part of the play."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"object": "list", "data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or body["messages"][0]["content"]
        with server.lock:
            before = server.asked[prompt]
            server.asked[prompt] += 1
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            server.paths.append(self.path)
            server.times.append(time.monotonic())
            server.flying += 1
            server.most = max(server.most, server.flying)
        try:
            deed = server.behave(prompt, before)
        finally:
            with server.lock:
                server.flying -= 1
        if isinstance(deed, bytes):
            self.answer(200, deed)
        elif isinstance(deed, tuple):
            self.answer(deed[0], deed[1], **deed[2] if len(deed) > 2 else {})
        elif deed == "hang":
            server.free.wait(20)
            self.close_connection = True
        elif deed == "reset":  # RST instead of an answer
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif deed == "half":  # promises more than it sends
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True

    def log_message(self, *_) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    """A server that runs in a thread for as long as the context is open."""
    server = Server()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.free.set()
        server.shutdown()
        server.server_close()

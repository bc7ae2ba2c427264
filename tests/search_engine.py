"""A search engine that answers as SearXNG does, from a handful of pages; slowly, if asked to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PAGES = [
    ("Paris", "Paris is the capital of France. It lies on the Seine."),
    ("Berlin", "Berlin is the capital of Germany. It lies on the Spree."),
    ("Cats", "A cat is a small animal that people keep at home. It purrs."),
]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "slowly" in query["q"][0]:
            time.sleep(1.5)
        results = [
            {"title": title, "url": f"https://example.org/{title.lower()}", "content": text}
            for title, text in PAGES
        ]
        first = query.get("pageno", ["1"]) == ["1"]
        body = json.dumps({"query": query["q"][0], "results": results if first else []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps tests quiet."""


@contextmanager
def search_engine() -> Iterator[str]:
    """The URL of one on a loopback port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

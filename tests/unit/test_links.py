"""Links to other sites: which count, and what an answer means."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tools.links import ROOT, Found, links_in, links_of, open_link, report

pytestmark = pytest.mark.checkout


class Site(BaseHTTPRequestHandler):
    """Answers with the status in the path."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Print nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_links_end_where_the_sentence_goes_on() -> None:
    text = (
        "See [SemVer](https://semver.org). Or <https://llmstxt.org>, and "
        "https://a.org/wiki/Queue_(data)#Use (https://b.org/c)."
    )
    assert links_in(text) == [
        "https://semver.org",
        "https://llmstxt.org",
        "https://a.org/wiki/Queue_(data)",
        "https://b.org/c",
    ]


@pytest.mark.parametrize(
    "link",
    [
        "http://127.0.0.1:9000",
        "http://localhost:7070/x",
        "http://minio:9000",
        "http://prometheus.monitoring:9090",
        "https://proxy.example.com/a",
        "https://{account}.blob.core.windows.net",
        "https://$HOST/a",
    ],
)
def test_hosts_of_examples_are_not_opened(link: str) -> None:
    assert links_in(f"`{link}`") == []


@pytest.mark.parametrize(
    ("status", "dead", "why"),
    [(200, False, ""), (404, True, "404"), (403, False, "403"), (503, False, "503")],
)
def test_only_a_missing_page_is_dead(site: str, status: int, dead: bool, why: str) -> None:
    found = open_link(f"{site}/{status}")
    assert found.dead == dead
    assert found.why.startswith(why)


def test_a_missing_host_is_dead(site: str) -> None:
    assert open_link("http://host.invalid/").dead


def test_the_report_names_the_files_of_a_dead_link(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {
        "https://a.org": Found(dead=False, why=""),
        "https://b.org": Found(dead=True, why="404 Not Found"),
        "https://c.org": Found(dead=False, why="403 Forbidden"),
    }
    files = {"https://a.org": ["a.md"], "https://b.org": ["b.md", "c.md"], "https://c.org": []}
    assert report(files, answers.__getitem__) == 1
    said = capsys.readouterr().out
    assert "dead: https://b.org in b.md, c.md: 404 Not Found" in said
    assert "undecided: https://c.org" in said
    assert "https://a.org" not in said


def test_links_of_pages_and_of_metadata_are_found() -> None:
    links = links_of(ROOT)
    assert "CHANGELOG.md" in links["https://semver.org"]
    assert any("pyproject.toml" in files for files in links.values())

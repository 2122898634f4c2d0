"""The hook of the site, and the generator that may replace Material."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[2]
ZENSICAL = shutil.which("zensical")


def load_hook() -> Any:
    spec = importlib.util.spec_from_file_location("hook", ROOT / "docs/hooks/repository.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hook = load_hook()


def test_a_link_leads_to_the_page_of_a_file_or_becomes_plain_text() -> None:
    text = "[a](../../CHANGELOG.md#x) [b](../../pyproject.toml) [c](options.md)\n"
    found = hook.relinked(text, "docs/reference/index.md", "reference/index.md")
    assert found == "[a](../changelog.md#x) b [c](options.md)\n"


def test_the_readme_is_the_home_page_with_its_picture() -> None:
    home = hook.outside_pages()["README.md"]
    text = hook.relinked(hook.page_text("README.md"), "README.md", home)
    assert home == "index.md"
    assert text.startswith("# opendata-buffer")
    assert "](figures/data-flow.svg)" in text
    assert "[Tutorial](tutorial/first-queue.md)" in text
    assert "](docs/" not in text
    assert "![" in text.replace("[![", "")
    assert "badge" not in text


def test_every_page_shows_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    config = hook.on_config(SimpleNamespace(copyright=None))
    assert config.copyright == f"opendata-buffer {project['version']}"


@pytest.mark.skipif(ZENSICAL is None, reason="no Zensical: pip install zensical")
def test_zensical_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    """Zensical runs no hooks, so their pages and links are written before."""
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    for page in docs.rglob("*.md"):
        uri = page.relative_to(docs).as_posix()
        page.write_text(hook.relinked(page.read_text("utf-8"), f"docs/{uri}", uri), "utf-8")
    for source, uri in hook.outside_pages().items():
        (docs / uri).parent.mkdir(parents=True, exist_ok=True)
        (docs / uri).write_text(hook.relinked(hook.page_text(source), source, uri), "utf-8")
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    config = re.sub(r"^hooks:\n(  .*\n)+", "", config, flags=re.MULTILINE)
    config = config.replace("[core, .]", f'["{ROOT / "core"}", "{ROOT}"]')
    (tmp_path / "mkdocs.yml").write_text(config, "utf-8")
    assert ZENSICAL is not None
    done = subprocess.run(
        [ZENSICAL, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "build" / "site"
    api = (built / "reference" / "api-producing" / "index.html").read_text("utf-8")
    assert "flush_interval_ms" in (built / "reference/api-configuration/index.html").read_text()
    assert "produce_async" in api
    assert (built / "changelog" / "index.html").exists()

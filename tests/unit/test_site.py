"""The site's hook."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def load_hook() -> Any:
    spec = importlib.util.spec_from_file_location("hook", ROOT / "docs/hooks/repository.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hook = load_hook()


def test_a_link_leads_to_the_page_of_a_file_and_is_plain_text_where_there_is_none() -> None:
    text = "[a](../../CHANGELOG.md#x) [b](../../pyproject.toml) [c](options.md)\n"
    found = hook.relinked(text, "docs/reference/index.md", "reference/index.md")
    assert found == "[a](../changelog.md#x) b [c](options.md)\n"


def test_cells_have_the_name_of_their_column_and_identifiers_are_marked() -> None:
    table = (
        "<table><thead><tr><th>a <em>b</em></th><th></th></tr></thead>"
        "<tbody><tr><td><code>--x</code></td><td><code>two words</code></td></tr></tbody></table>"
    )
    found = hook.on_page_content(table, page=None, config=None, files=None)
    assert '<td data-name="a b"><code class="identifier">--x</code></td>' in found
    assert '<td data-name=""><code>two words</code></td>' in found

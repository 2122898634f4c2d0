"""Pages of the site that lie elsewhere in the repository, and links that work in both places.

Every page is also read where the repository is browsed, so its links are relative paths of files.
On the site some of those files are pages, at another place; the others are not there, and a link
to one becomes plain text.
"""

from __future__ import annotations

import html as entities
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_BADGE = re.compile(r"^\[!\[.*\n", re.MULTILINE)
_INLINE_CODE = re.compile(r"<code>([^<>\n]+)</code>")
_COMMANDS = re.compile(r'<div class="language-(?:sh|console) highlight">.*?</div>', re.DOTALL)
_OPTION = re.compile(r"(?<![\w&-])--?[a-z][\w-]*")
_PHONE = 38
"""Characters of code that a phone shows in a line."""
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD_CELL = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def outside_pages() -> dict[str, str]:
    """Path in the repository to path on the site, of pages that are not below ``docs/``."""
    pages = {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        "CONTRIBUTING.md": "contributing.md",
        "SECURITY.md": "security.md",
        "core/failures.md": "explanation/failures.md",
        "core/decisions/README.md": "explanation/decisions/index.md",
    }
    for decision in sorted((ROOT / "core" / "decisions").glob("0*.md")):
        pages[f"core/decisions/{decision.name}"] = f"explanation/decisions/{decision.name}"
    for example in sorted((ROOT / "examples").glob("*.py")):
        pages[f"examples/{example.name}"] = f"how-to/examples/{example.stem}.md"
    pages["examples/kubernetes/broker.yaml"] = "how-to/examples/kubernetes.md"
    pages["examples/kubernetes/scale-from-zero.yaml"] = "how-to/examples/scale-from-zero.md"
    pages["examples/kubernetes/job-on-backlog.yaml"] = "how-to/examples/job-on-backlog.md"
    for readme in sorted((ROOT / "examples").glob("*/README.md")):
        pages[f"examples/{readme.parent.name}/README.md"] = (
            f"how-to/examples/{readme.parent.name}.md"
        )
    return pages


def page_text(path: str) -> str:
    """Return the Markdown of the page at ``path``, with a program in a block of code.

    Search ranks guides above decisions, the changelog, and programs. The README is the home page,
    without its badges: the site loads nothing from other hosts.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".md"):
        language = "python" if path.endswith(".py") else "yaml"
        text = f"# {path}\n\n```{language}\n{text}```\n"
    if path == "README.md":
        return _BADGE.sub("", text)
    return f"---\nsearch:\n  boost: 0.001\n---\n\n{text}"


def relinked(markdown: str, source: str, target: str) -> str:
    """The Markdown of ``source`` (in the repository) with the links it has as page ``target``."""
    pages = outside_pages()

    def link(match: re.Match[str]) -> str:
        text, (path, mark, anchor) = match[1], match[2].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = pages.get(found)
        if page is None and found.startswith("docs/") and (ROOT / found).is_file():
            page = found.removeprefix("docs/")
        if page is None:
            return text
        page = posixpath.relpath(page, posixpath.dirname(target) or ".")
        return f"{'!' * match[0].startswith('!')}[{text}]({page}{mark}{anchor})"

    parts = _CODE.split(markdown)  # the odd ones are code
    return "".join(part if index % 2 else _LINK.sub(link, part) for index, part in enumerate(parts))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version of the package at the end of each page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    config.copyright = f"opendata-buffer {project['version']}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside of ``docs/``."""
    from mkdocs.structure.files import File

    for path, uri in outside_pages().items():
        files.append(File.generated(config, uri, content=page_text(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes the links of a page those of the site."""
    uri = page.file.src_uri
    sources = {target: source for source, target in outside_pages().items()}
    return relinked(markdown, sources.get(uri, f"docs/{uri}"), uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Write ``llms.txt``: the pages of the navigation, for programs that read the site."""
    Path(config.site_dir, "llms.txt").write_text(llms_text(config.nav or [], config), "utf-8")


def llms_text(nav: list[Any], config: Any) -> str:
    """Return the text of ``llms.txt``, in the form of https://llmstxt.org.

    Args:
        nav: The navigation of ``mkdocs.yml``.
        config: Has ``site_name`` and ``site_description``.

    Returns:
        A list of links for each part of the navigation, relative to the root of the site.
    """
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for item in nav:
        ((title, pages),) = item.items() if isinstance(item, dict) else [("Pages", item)]
        found = list(_pages_of(pages, title))
        lines += ["", f"## {title}", "", *(f"- [{name}]({url or './'})" for name, url in found)]
    return "\n".join(lines) + "\n"


def _pages_of(pages: Any, title: str) -> Iterator[tuple[str, str]]:
    """Yield the titles and URLs of the pages below a part of the navigation."""
    if isinstance(pages, str):
        url = re.sub(r"(index)?\.md$", "", pages)
        yield title, url if not url or url.endswith("/") else f"{url}/"
        return
    for page in pages:
        ((name, below),) = page.items() if isinstance(page, dict) else [(title, page)]
        yield from _pages_of(below, name)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets a phone show wide content: no line breaks within an identifier, and cells have names."""
    html = _INLINE_CODE.sub(lambda code: f"<code>{_words(code[1])}</code>", html)
    html = _COMMANDS.sub(
        lambda block: _OPTION.sub(r'<span class="identifier">\g<0></span>', block[0]), html
    )
    return _TABLE.sub(lambda table: _with_names(table[0]), html)


def _words(code: str) -> str:
    """Code in a sentence, which breaks between words, and in long ones behind a slash or dot."""
    return re.sub(r"\S+", lambda word: _whole(word[0]), code)


def _whole(word: str) -> str:
    pieces = [word] if len(entities.unescape(word)) <= _PHONE else re.split(r"(?<=[/.])", word)
    return "<wbr>".join(
        f'<span class="identifier">{each}</span>'
        if len(entities.unescape(each)) <= _PHONE
        else each
        for each in pieces
    )


def _with_names(table: str) -> str:
    """A table whose cells have their column's name, by which the style sheet stacks them."""
    names = [re.sub(r"<.*?>", "", each) for each in _HEAD_CELL.findall(table)]

    def row(found: re.Match[str]) -> str:
        cells = iter(names)
        return re.sub(r"<td", lambda _: f'<td data-name="{next(cells, "")}"', found[0])

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.DOTALL)

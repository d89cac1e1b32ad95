"""Makes a site of what is written for readers of the repository: MkDocs calls these hooks.

README.md is its first page, CONTRIBUTING.md and CHANGELOG.md are pages too, and every other file of
the repository that a page links to becomes a file of the site, so that no link leads out of it.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
PAGES |= {"CHANGELOG.md": "changelog.md"}
WIDE = ("support.md",)  # whose tables need the room of the table of contents
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the guides, whichever there are."""
    guides = sorted((ROOT / "docs/guides").glob("*.md"))
    found: list[Any] = [f"guides/{path.name}" for path in guides]
    config.nav = [{"Guides": found} if "Guides" in part else part for part in config.nav or []]
    config.nav = [part for part in config.nav if part != {"Guides": []}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the style sheet, the pages that are not in docs/, and the files that pages link to."""
    style = Path(__file__).with_name("site.css")
    files.append(File.generated(config, style.name, abs_src_path=str(style)))
    for own, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / own)))
    linked = {path for file in files.documentation_pages() for path in _linked(file)}
    for path in sorted(linked):
        files.append(File.generated(config, _in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """Turns links to files of the repository into links to those of the site."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri in _contributors(config):  # a search lists the pages for users first
        page.meta["search"] = {"boost": 0.1}
    return _LINK.sub(lambda found: _rewritten(found, page.file), markdown)


def _contributors(config: MkDocsConfig) -> set[str]:
    """The pages of the navigation's section "Contributors", and the list of changes."""
    found = [page for part in config.nav or [] for page in part.get("Contributors", ())]
    return {"changelog.md", *found}


def _source(file: File) -> Path:
    """Where a page lies in the repository."""
    own = {page: name for name, page in PAGES.items()}
    return Path(own.get(file.src_uri, f"docs/{file.src_uri}"))


def _target(file: File, link: str) -> str | None:
    """The path in the repository that a page's link means; None for links of other kinds."""
    if re.match(r"[a-z]+:|#|/", link):
        return None
    return posixpath.normpath((_source(file).parent / link.partition("#")[0]).as_posix())


def _in_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    # Text, not Markdown to be rendered, and shown by a browser rather than saved.
    return f"source/{path}" if path.endswith((".png", ".jpg", ".svg")) else f"source/{path}.txt"


def _linked(file: File) -> set[str]:
    """Files of the repository outside of docs/ that a page links to."""
    targets = (_target(file, link) for _, _, link in _LINK.findall(file.content_string))
    return {
        path
        for path in targets
        if path and not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file()
    }


def _rewritten(found: re.Match[str], file: File) -> str:
    bang, text, link = found.groups()
    path = _target(file, link)
    if path is None:
        return found[0]
    if (ROOT / path).is_dir():
        return str(text)  # a folder has no page
    here = posixpath.dirname(file.src_uri)
    anchor = link[link.index("#") :] if "#" in link else ""
    return f"{bang}[{text}]({posixpath.relpath(_in_site(path), here or '.')}{anchor})"

"""Adapt the pages to MkDocs: links that leave docs/, and fences that name a test.

Pages link to source files, which work in a checkout and on a repository's web page. Here such a
link leads to the repository (`repo_url`, from REPO_URL), or is plain text if there is none. Images
from other folders are copied into the site. A target that does not exist is a warning, and so an
error in a strict build.
"""

import logging
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)]*)?\)")
log = logging.getLogger("mkdocs.hooks")


def on_files(files, config):
    """Add the images of the environments to the site."""
    for path in sorted(ROOT.glob("ocean/*/*.png")):
        name = f"files/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite links out of docs/, and take the test's name off a fence."""
    folder = Path(page.file.abs_src_path).parent
    repository = (config.repo_url or "").rstrip("/")

    def rewrite(match):
        image, text, target, anchor = match.groups()
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        if not path.exists():
            log.warning("%s: there is no %s", page.file.src_uri, target)
            return text
        name = path.relative_to(ROOT).as_posix()
        if image:
            return f"![{text}]({os.path.relpath(ROOT / 'docs/files' / name, folder)})"
        if not repository:
            return text if text.startswith("`") else f"`{text}`" if "." in text else text
        kind = "tree" if path.is_dir() else "blob"
        return f"[{text}]({repository}/{kind}/main/{name}{anchor or ''})"

    return re.sub(r"^```sh \w+$", "```sh", LINK.sub(rewrite, markdown), flags=re.M)

"""What the site shows and the repository keeps outside of docs/: tables of results, notebooks, the list of changes."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Folder, and the files in it. A page's address is its path from the folder.
OUTSIDE = (("benchmarks", "results/*.md"), (".", "notebooks/*.ipynb"), (".", "CHANGELOG.md"))
# Pages link to them by their paths in the repository, where docs/ is one folder more to leave.
_LINK = re.compile(r"\]\(\.\./((?:\.\./)*)(?:benchmarks/(?=results/)|(?=notebooks/|CHANGELOG\.md))")


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files to those of docs/."""
    for place, pattern in OUTSIDE:
        folder = Path(config.config_file_path).parent / place
        for file in sorted(folder.glob(pattern)):
            name = file.relative_to(folder).as_posix()
            files.append(File(name, str(folder), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave the width of the page to the tables of results, and lead links to the pages that `on_files` adds."""
    if page.file.src_uri.startswith("results/"):
        page.meta["hide"] = ["toc"]
    return _LINK.sub(r"](\1", markdown)

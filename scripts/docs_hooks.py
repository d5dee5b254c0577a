"""What MkDocs does not do by itself: the menu of the pages that are there, and pages made from files outside docs/.

Pages that no section of the menu names stand under "More", so that a new file in docs/ is listed without a change here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Nav = list[dict[str, Any]]

MENU: dict[str, tuple[str, ...]] = {
    "Start": ("index.md", "migration.md", "support.md"),
    "Features": ("conventions.md", "masks.md", "varlen.md", "kvcache.md", "transforms.md", "compat.md"),
    "Understand": ("numerics.md", "lab.md", "portable-kernels.md", "hopper-forward.md", "hopper-backward.md", "host-time.md"),
    "Measured": ("results.md", "benchmark.md", "demo.md"),
    "Reference": ("api.md", "changelog.md", "contributing.md"),
}
# Pages that are whole files of the repository.
COPIED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "benchmark.md": "benchmarks/README.md"}
# Parts of README.md between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, put where a page says `<!-- from README: NAME -->`.
FROM_README = re.compile(r"<!-- from README: (\w+) -->")
FIGURES = "<!-- figures -->"  # where a page shows every picture of the benchmark
THEMES = ("light", "dark")
CAPTIONS = {
    "speed-fwd": "Forward: speed against length, ours and the peers'",
    "speed-bwd": "Backward",
    "speed-fwd-bwd": "Forward and backward together",
    "memory": "Memory above the inputs against length",
    "density": "Block-sparse: speed-up over the fastest dense call against the share of tiles kept",
    "ratio": "Ratio to the best peer in every cell of the grid",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the copied pages and writes the menu."""
    from mkdocs.structure.files import File

    for page, source in COPIED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    config.nav = menu({file.src_uri for file in files if file.src_uri.endswith(".md")})
    return files


def menu(pages: set[str]) -> Nav:
    """The menu over these pages: the sections' pages that exist, and the others."""
    named = {page for section in MENU.values() for page in section}
    sections = {title: [page for page in section if page in pages] for title, section in MENU.items()}
    sections["More"] = sorted(pages - named)
    return [{title: found} for title, found in sections.items() if found]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills in parts of the README and the benchmark's pictures."""
    return FROM_README.sub(lambda match: readme_part(match[1]), markdown.replace(FIGURES, figures()))


def figures() -> str:
    """Every picture of the benchmark that `make tables` has drawn, the light or the dark one as the page is."""
    shown = [name for name in CAPTIONS if (ROOT / f"docs/figures/bench-{name}-light.svg").exists()]
    return "\n\n".join(
        f"## {CAPTIONS[name]}\n\n" + "\n".join(f"![{CAPTIONS[name]}](figures/bench-{name}-{theme}.svg#only-{theme})" for theme in THEMES)
        for name in shown
    )


def readme_part(name: str) -> str:
    """The generated part of this name."""
    text = (ROOT / "README.md").read_text()
    begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    return text[text.index(begin) + len(begin) : text.index(end)]

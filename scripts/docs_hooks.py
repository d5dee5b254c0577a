"""What MkDocs does not do by itself: the menu of the pages that are there, and pages made from files outside docs/.

Pages that no section of the menu names stand under "More", so that a new file in docs/ is listed without a change here.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Nav = list[dict[str, Any]]

MENU: dict[str, tuple[str, ...]] = {
    "Start": ("index.md", "migration.md", "support.md"),
    "Features": ("conventions.md", "gallery.md", "masks.md", "varlen.md", "kvcache.md", "transforms.md", "compat.md"),
    "Understand": ("numerics.md", "lab.md", "portable-kernels.md", "hopper-forward.md", "hopper-backward.md"),
    "Measured": ("results.md", "benchmark.md", "demo.md"),
    "Reference": ("api.md", "changelog.md", "contributing.md"),
}
# Pages that are whole files of the repository.
COPIED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "benchmark.md": "benchmarks/README.md"}
# Parts of README.md between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, put where a page says `<!-- from README: NAME -->`.
FROM_README = re.compile(r"<!-- from README: (\w+) -->")
GALLERY = "<!-- gallery -->"  # where a page shows the rules of its list `gallery`
COMPATIBLE = ("flash_attn", "sdpa", "flex")
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
    for theme in THEMES:
        files.append(File.generated(config, f"figures/gallery-{theme}.svg", content=draw_gallery(theme)))
    config.nav = menu({file.src_uri for file in files if file.src_uri.endswith(".md")})
    return files


def menu(pages: set[str]) -> Nav:
    """The menu over these pages: the sections' pages that exist, and the others."""
    named = {page for section in MENU.values() for page in section}
    sections = {title: [page for page in section if page in pages] for title, section in MENU.items()}
    sections["More"] = sorted(pages - named)
    return [{title: found} for title, found in sections.items() if found]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills parts of the README in, and the modules of the API that exist."""
    if page.file.src_uri == "api.md":
        found = [name for name in COMPATIBLE if (ROOT / f"src/tilewise/compat/{name}.py").exists()]
        if found:
            markdown += "\n## Drop-ins\n" + "".join(f"\n::: tilewise.compat.{name}\n" for name in found)
    markdown = markdown.replace(FIGURES, figures())
    pictures = [f"![Which keys each query sees](figures/gallery-{theme}.svg#only-{theme})" for theme in THEMES]
    markdown = markdown.replace(GALLERY, "\n".join(pictures))
    return FROM_README.sub(lambda match: readme_part(match[1]), markdown)


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


def draw_gallery(theme: str) -> str:
    """The rules of docs/gallery.md as one SVG, each below its own source text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "gallery.md").read_text(), re.DOTALL)
    assert block is not None
    source, names = block[1], {}
    exec(source, names)
    listed = next(
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "gallery"
    )
    assert isinstance(listed, ast.List)
    ink, paper = {"light": ("#1b1b1b", "#ffffff"), "dark": ("#e8e8e8", "#1e2129")}[theme]
    figure, axes = pyplot.subplots(-(-len(listed.elts) // 3), 3, figsize=(10.5, 3.7 * -(-len(listed.elts) // 3)), layout="constrained")
    figure.patch.set_facecolor(paper)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, rule, written in zip(axes.flat, names["gallery"], listed.elts, strict=False):
        rule.plot(64, 64, ax=axis)
        axis.set(xlabel="", ylabel="", xticks=[], yticks=[])
        text = textwrap.fill(ast.get_source_segment(source, written) or "", 40, break_long_words=False)
        axis.set_title(text, fontsize=8, family="monospace", color=ink)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tilewise"}):
        figure.savefig(drawn, format="svg", facecolor=paper, metadata={"Date": None})
    pyplot.close(figure)
    return drawn.getvalue()

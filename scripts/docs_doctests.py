"""A griffe extension for the API pages: doctests in docstrings are shown as Python sessions, wherever they stand in the text."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object


class Doctests(Extension):
    """Fences every run of lines that starts with `>>>` and ends before an empty line."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrites the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with its doctests as fenced blocks.

    >>> fenced("Twice:\\n    >>> 2 * 3\\n    6\\n\\nEnd.").splitlines()
    ['Twice:', '    ```pycon', '    >>> 2 * 3', '    6', '    ```', '', 'End.']
    """
    lines: list[str] = []
    inside = ""
    for line in [*text.splitlines(), ""]:
        indent = line[: len(line) - len(line.lstrip())]
        if not inside and line.lstrip().startswith(">>>"):
            inside = indent + "```"
            lines.append(inside + "pycon")
        elif inside and not line.strip():
            lines.append(inside)
            inside = ""
        lines.append(line)
    return "\n".join(lines[:-1])

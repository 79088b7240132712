"""What notebooks show: the text that `print` shows, below the picture where matplotlib is installed."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from remat_opt.report.pictures import as_svg


def to_html(text: str, draw: Callable[[], Any] | None = None) -> str:
    """Text, and a picture of it, as HTML.

    Args:
        text: plain text in columns.
        draw: makes the matplotlib figure; None for no picture.
    """
    picture = ""
    if draw is not None:
        try:
            picture = as_svg(draw())
        except ImportError:
            picture = ""  # without matplotlib the text says it all
    return f'<div>{picture}<pre style="line-height: 1.2">{html.escape(text)}</pre></div>'

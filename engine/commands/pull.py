"""python -m engine pull: fetch a model for machines without a hub."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from engine.weights.pull import pull


def pull_command(
    name: Annotated[str, typer.Argument(help="which model: smollm2")] = "smollm2",
) -> None:
    """Download a model once and convert it; later calls find it in the cache."""
    console = Console(stderr=True)
    with console.status("…") as status:
        pull(name, say=lambda text: status.update(escape(text)))
    console.print(f"{name} is ready: python -m engine generate --model {name} --chat --prompt …")

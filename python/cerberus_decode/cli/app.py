"""The commands under one name."""

from __future__ import annotations

import typer

from .bench import bench
from .generate import generate
from .info import info
from .train import train

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Generate text with Cerberus draft heads, compare decoding methods, and train heads.",
)
app.command()(generate)
app.command()(bench)
app.command()(train)
app.command()(info)

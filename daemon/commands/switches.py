"""Help that gives no type to what takes no value: typer writes <bool> behind every switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

Function = TypeVar("Function", bound=Callable[..., Any])


def untyped(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return untyped(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return untyped(super().get_params(ctx))


class Commands(typer.Typer):
    """A `typer.Typer` of those."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, **options)

    def command(self, *arguments: Any, **options: Any) -> Callable[[Function], Function]:
        options["cls"] = options.get("cls") or Command
        return super().command(*arguments, **options)

"""Arguments that several commands of the benchmark take."""

from __future__ import annotations

import argparse
from collections.abc import Collection


def add_names(
    parser: argparse.ArgumentParser,
    argument: str,
    known: Collection[str],
    default: str = "all of them if none is named",
) -> None:
    """Adds an argument that takes any number of known names; an unknown name is an error.

    Args:
      parser: the parser to add it to.
      argument: the name of the argument.
      known: the known names, in the order of the help.
      default: the help text for the case without names.
    """

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}")
        return text

    parser.add_argument(
        argument,
        nargs="*",
        type=name,  # not choices: argparse of Python 3.11 checks the empty default against them
        metavar=argument.upper(),
        help=f"{', '.join(known)}; {default}",
    )

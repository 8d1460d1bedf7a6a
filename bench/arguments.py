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
    """Adds an argument of any number of names; those that are not known are errors.

    Args:
      parser: what to add it to.
      argument: what the parsed arguments call it.
      known: the names, in the order in which the help has them.
      default: what the help says of no name.
    """

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}")
        return text

    parser.add_argument(
        argument,
        nargs="*",
        type=name,  # not choices: among them argparse of Python 3.11 looks for "none named"
        metavar=argument.upper(),
        help=f"{', '.join(known)}; {default}",
    )

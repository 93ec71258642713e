"""Everything that reaches a job script goes through here: it stays one word, or it is refused.

A script is read twice: by bash, and its `#SBATCH` lines before that by Slurm, which has quotes and comments of its own.
What stands there comes from recipes, file names, profiles and options, any of which somebody else may have written.
"""

import re
import shlex

from isoscale.errors import UserError

PLAIN = re.compile(r"[A-Za-z0-9_./:,%@=+-]+")
"""What means nothing but itself behind #SBATCH; other values have quotes."""
LONGEST = 4000
"""Characters of a value that Slurm has room for."""


def word(text: str) -> str:
    """A word of a command in bash."""
    return shlex.quote(_one_line(text))


def value(text: str) -> str:
    """A value behind #SBATCH, where `#` begins a comment, blanks separate, and quotes may stand anywhere."""
    _one_line(text)
    if any(sign in text for sign in '"\\') or len(text) > LONGEST:
        raise UserError(f'{_shown(text)} cannot stand in a job script: leave out " and \\, and be brief')
    return text if PLAIN.fullmatch(text) else f'"{text}"'


def options(text: str) -> str:
    """Further options behind #SBATCH, as they would be typed: word by word, so that no quote is left open."""
    try:
        words = shlex.split(_one_line(text))
    except ValueError:
        raise UserError(f"{_shown(text)} cannot stand in a job script: a quote is not closed") from None
    return " ".join(value(each) for each in words)


def line(text: str) -> str:
    """A line of shell that the user has written as one: it must not reach into the next."""
    try:
        is_whole = bool(shlex.split(_one_line(text))) and not text.endswith("\\")
    except ValueError:
        is_whole = False
    if not is_whole:
        raise UserError(f"{_shown(text)} is not a complete line of shell: a quote is not closed, or it ends with \\")
    return text


def comment(text: str) -> str:
    """A remark on one line; signs that nobody sees become question marks."""
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))


def _one_line(text: str) -> str:
    if not text or not text.isprintable():
        raise UserError(f"{_shown(text)} cannot stand in a job script: it must be one line of text that can be printed")
    return text


def _shown(text: str) -> str:
    shown = ascii(text) if not text.isprintable() else repr(text)
    return shown if len(shown) < 200 else f"{shown[:200]}…"

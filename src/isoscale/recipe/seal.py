"""The seal of what a user's own programs wrote: where it is right, nobody else has chosen what stands there.

It is made with the user's secret, so that it is as good on every host with the same home folder, and wherever the files
are moved. Elsewhere, and on what others wrote, there is none.
"""

from isoscale.errors import UserError
from isoscale.parallel.secret import Key, user_key

_LINE = "# sealed: "
"""Before the seal of a text, which is its last line."""


def seal(text: str) -> str:
    """The seal of a text; empty where the user has no secret, and none can be made."""
    key = _key()
    return "" if key is None else key.sign(text.encode()).hex()


def is_sealed(text: str, found: str) -> bool:
    """Whether a seal was made by this user, for this text."""
    key = _key()
    try:
        return key is not None and key.has_signed(bytes.fromhex(found), text.encode())
    except ValueError:  # no hexadecimal number
        return False


def with_seal(text: str) -> str:
    """Lines of YAML with their seal as a comment behind them."""
    found = seal(text)
    return f"{text}{_LINE}{found}\n" if found else text


def has_seal(sealed: str) -> bool:
    """Whether the last line is the seal of those before."""
    text, line, found = sealed.rpartition(_LINE)
    return bool(line) and is_sealed(text, found.strip())


def adopted(sealed: str) -> str:
    """The lines of somebody else, sealed by this user, who trusts them."""
    text, line, _ = sealed.rpartition(_LINE)
    return with_seal(text if line else sealed)


def _key() -> Key | None:
    try:
        return user_key().derive(b"seal")
    except UserError:  # a home folder that is not there, or cannot be written
        return None

"""The secret that the processes of a training share, so that nobody else is taken for one of them.

A launcher of ours makes a new one for each start and leaves it in the environment of its ranks. Without that, ranks
that another launcher started take the one in a file of the user, which all hosts see that share the home folder.
"""

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from isoscale.errors import UserError

VARIABLE = "ISOSCALE_SECRET"
NUM_BYTES = 32
SHORTEST = 16
"""Characters of a secret that a person chooses."""
EXPORT = f"export {VARIABLE} with the same value on all hosts, for example that of: openssl rand -hex {NUM_BYTES}"
"""What to type where the file does not do."""


class Key:
    """Signs what ranks say, and knows what was signed by one with the same secret."""

    def __init__(self, secret: bytes) -> None:
        """From the secret."""
        self._secret = secret

    def sign(self, *parts: bytes) -> bytes:
        """The signature of some parts; other parts, or the same bytes parted elsewhere, have another one."""
        joined = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self._secret, joined, "sha256")

    def has_signed(self, signature: bytes, *parts: bytes) -> bool:
        """Whether a signature is that of these parts."""
        return hmac.compare_digest(signature, self.sign(*parts))

    def derive(self, *parts: bytes) -> "Key":
        """A key for one purpose; what is signed with it means nothing elsewhere."""
        return Key(self.sign(b"derive", *parts))


def fresh() -> str:
    """A new secret, for the environment of ranks."""
    return secrets.token_hex(NUM_BYTES)


def shared_key() -> Key:
    """That of this process and of all that were started with it."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return user_key()
    if len(given) < SHORTEST:
        raise UserError(
            f"{VARIABLE} has {len(given)} characters, and whoever guesses it can take part in the training: it must "
            f"have at least {SHORTEST}\n{EXPORT}"
        )
    return Key(os.fsencode(given))


def user_key() -> Key:
    """That of the user, whatever the launcher gave to this process."""
    path = file()
    try:
        found = _read(path)
        if found is None:
            _create(path)
            found = _read(path)
    except OSError as error:
        raise UserError(
            f"ranks need a secret that they share, and {path} cannot be used: {error.strerror or error}\n{EXPORT}"
        ) from None
    if not found or len(found) < SHORTEST:
        raise UserError(
            f"{path} should hold a secret of at least {SHORTEST} characters; remove it, and it is made anew"
        )
    return Key(found.encode())


def file() -> Path:
    """Where the user's own secret is kept."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "isoscale" / "secret"
    except RuntimeError as error:
        raise UserError(
            f"ranks need a secret that they share, and there is no home folder: {error}\n{EXPORT}"
        ) from None


def origin() -> str:
    """Where this process has its secret from, in words."""
    return f"the variable {VARIABLE}" if VARIABLE in os.environ else f"the file {file()}"


def _read(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, encoding="ascii", errors="replace") as opened:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise UserError(f"{path} should be a file with a secret; remove it, and it is made anew")
        if about.st_uid != os.geteuid():
            raise UserError(
                f"{path} belongs to user {about.st_uid}, and this process runs as user {os.geteuid()}: who knows the "
                f"secret can take part in trainings\nremove it, and it is made anew; or {EXPORT}"
            )
        if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(
                f"{path} can be used by others (mode {stat.S_IMODE(about.st_mode):o}), and who knows the secret can "
                f"take part in trainings\nremove it, and it is made anew, readable by you alone: rm {path}"
            )
        return opened.read(4096).strip()


def _create(path: Path) -> None:
    """Make the file, complete from its first moment on; of several processes that try, one does it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_name(f".secret-{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as opened:
            opened.write(f"{fresh()}\n")
            opened.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink()

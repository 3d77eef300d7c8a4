"""The text to train on: the source of Python's own standard library, one byte a character.

Megabytes of real text that are on every machine with Python, without a download. Only the standard library is used
here, because the supervisor writes the tokens once and the workers map the file.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

# The vocabulary is fixed, so that a token means the same on every machine: newline, the printable ASCII characters,
# and one token for every byte that is none of these.
CHARACTERS = b"\n" + bytes(range(32, 127))
OTHER = len(CHARACTERS)
VOCABULARY_SIZE = len(CHARACTERS) + 1

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_TOKEN_OF_BYTE = bytes(CHARACTERS.index(byte) if byte in CHARACTERS else OTHER for byte in range(256))


def encode(text: bytes) -> bytes:
    """Return one token for each byte of a UTF-8 text, after tabs became four spaces and line ends newlines."""
    return text.replace(b"\r\n", b"\n").replace(b"\t", b"    ").translate(_TOKEN_OF_BYTE)


def decode(tokens: bytes) -> str:
    """Return the text of these tokens; `OTHER` becomes U+FFFD.

    Raises:
        ValueError: a token is outside the vocabulary.
    """
    if tokens and max(tokens) >= VOCABULARY_SIZE:
        raise ValueError(f"token {max(tokens)} is outside the vocabulary of {VOCABULARY_SIZE}")
    return "".join(chr(CHARACTERS[token]) if token < OTHER else "\ufffd" for token in tokens)


def read_standard_library(folder: Path | None = None, *, max_bytes: int = 16_000_000) -> bytes:
    """Read the Python files below a folder in the order of their names, up to a number of bytes.

    Args:
        folder: where to look; the standard library of this Python if None.
        max_bytes: stop after the file that reaches this.

    Raises:
        FileNotFoundError: there is no Python source there (some distributions ship the library without it).
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    texts: list[bytes] = []
    num_bytes = 0
    for path in sorted(folder.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            texts.append(path.read_bytes())
            num_bytes += len(texts[-1])
            if num_bytes >= max_bytes:
                break
    if not texts:
        raise FileNotFoundError(f"no Python source below {folder}; the demo trains on the standard library's text")
    return b"\n".join(texts)


def write_tokens(path: Path) -> int:
    """Write the standard library's tokens to a file, one byte a token, and return how many there are."""
    tokens = encode(read_standard_library())
    path.write_bytes(tokens)
    return len(tokens)

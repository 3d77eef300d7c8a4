"""The text of the demo: fixed vocabulary, fixed order."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo import corpus


def test_printable_ascii_survives_encoding_and_the_rest_becomes_other() -> None:
    text = b"def f(x):\r\n\treturn '~ \xc3\xa9'\n"

    assert corpus.decode(corpus.encode(text)) == "def f(x):\n    return '~ \ufffd\ufffd'\n"


def test_every_byte_has_a_token_inside_the_vocabulary() -> None:
    tokens = corpus.encode(bytes(range(256)))

    assert set(tokens) == set(range(corpus.VOCABULARY_SIZE))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token 97"):
        corpus.decode(bytes([1, 97]))


def test_files_are_read_in_the_order_of_their_names_without_tests_and_up_to_the_limit(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/s.py", "c.py", "d.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")

    assert corpus.read_standard_library(tmp_path, max_bytes=12) == b"# a/z.py\n\n# b.py\n"


def test_a_folder_without_python_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        corpus.read_standard_library(tmp_path)


@pytest.mark.slow
def test_this_machine_has_megabytes_of_text() -> None:
    assert len(corpus.read_standard_library(max_bytes=2_000_000)) >= 2_000_000

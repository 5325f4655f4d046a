"""The cache of built corpora: mapped when sound, built again when not, and never an error."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from scaling_lab.data.cache import load_or_build
from scaling_lab.data.corpus import Corpus, byte_corpus
from scaling_lab.data.documents import ListedBorders
from scaling_lab.data.stdlib import stdlib_corpus

ROOT = Path(__file__).parents[1]
LICENSE = Path(sysconfig.get_path("stdlib"), "this.py").read_bytes()


class Builder:
    """Builds the corpus of one real text, and counts how often."""

    def __init__(self, *texts: bytes):
        self.texts, self.built = texts or (LICENSE,), 0

    def __call__(self):
        self.built += 1
        return byte_corpus(self.texts, 1)

    def load(self, folder, signature="now"):
        return load_or_build(folder, "text", signature, self)


def test_the_second_job_maps_what_the_first_built(tmp_path):
    builder = Builder()
    first, second = builder.load(tmp_path), builder.load(tmp_path)
    assert builder.built == 1
    assert bytes(second.tokens) == bytes(first.tokens) == LICENSE
    assert second.facts == first.facts
    assert isinstance(second.tokens.base, np.memmap)


def test_where_documents_begin_is_mapped_too(tmp_path):
    builder = Builder(b"abc", b"", b"defg")
    builder.load(tmp_path)
    # "abc\n", "\n", "defg": 4 bytes, 1 byte, 4 bytes.
    mapped = builder.load(tmp_path)
    assert builder.built == 1
    assert isinstance(mapped.borders, ListedBorders)
    assert mapped.borders.positions.tolist() == [0, 4, 5]
    assert isinstance(mapped.borders.positions.base, np.memmap)
    assert mapped.borders.positions.flags.aligned
    assert bytes(mapped.tokens) == b"abc\n\ndefg"
    assert mapped.record["documents"] == 3


def test_unknown_borders_stay_unknown_and_no_document_is_no_unknown(tmp_path):
    facts = byte_corpus([LICENSE], 1).facts
    for borders in (None, ListedBorders(np.empty(0, np.int64))):
        corpus = Corpus(np.empty(0, np.uint8), facts, borders)
        found = load_or_build(tmp_path, "facts", str(borders is None), lambda corpus=corpus: corpus)
        assert found is not corpus
        assert found.record["documents"] == (None if borders is None else 0)


def test_an_entry_of_the_format_before_is_built_again(tmp_path):
    builder = Builder()
    builder.load(tmp_path)
    path = tmp_path / "text.tokens"
    content = path.read_bytes()
    assert content.startswith(b'{"format": 2, ')
    path.write_bytes(content.replace(b'"format": 2', b'"format": 1', 1))
    builder.load(tmp_path)
    assert builder.built == 2
    assert path.read_bytes() == content


def test_no_folder_means_no_cache():
    builder = Builder()
    assert bytes(builder.load(None).tokens) == bytes(builder.load(None).tokens) == LICENSE
    assert builder.built == 2


def test_another_state_of_the_files_replaces_the_entry(tmp_path):
    builder = Builder()
    builder.load(tmp_path, "before")
    builder.load(tmp_path, "after")
    assert builder.built == 2
    assert len(list(tmp_path.iterdir())) == 1


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip_a_token(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


def _move_a_document(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1024] ^= 1
    path.write_bytes(content)


def _forget_the_documents(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"starts": 1,', b'"starts": 0,'))


def _zero_the_end(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-100] + bytes(100))


def _spoil_the_header(path: Path) -> None:
    path.write_bytes(b"{" + path.read_bytes())


def _a_header_of_another_kind(path: Path) -> None:
    path.write_bytes(b"[]".ljust(1024) + LICENSE)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _empty,
        _flip_a_token,
        _zero_the_end,
        _move_a_document,
        _forget_the_documents,
        _spoil_the_header,
        _a_header_of_another_kind,
    ],
)
def test_a_damaged_entry_is_built_again(tmp_path, damage):
    builder = Builder()
    builder.load(tmp_path)
    damage(tmp_path / "text.tokens")
    assert bytes(builder.load(tmp_path).tokens) == LICENSE
    assert builder.built == 2
    builder.load(tmp_path)
    assert builder.built == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert bytes(Builder().load(tmp_path / "file" / "cache").tokens) == LICENSE


def test_an_entry_that_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    (tmp_path / "text.tokens").mkdir()
    assert bytes(Builder().load(tmp_path).tokens) == LICENSE
    assert os.listdir(tmp_path) == ["text.tokens"]


def test_a_mapped_entry_survives_its_replacement(tmp_path):
    before = Builder().load(tmp_path, "before")
    Builder(LICENSE[::-1]).load(tmp_path, "after")
    assert bytes(before.tokens) == LICENSE


def test_an_empty_corpus_can_be_kept(tmp_path):
    builder = Builder(b"")
    builder.load(tmp_path)
    assert len(builder.load(tmp_path).tokens) == 0
    assert builder.built == 1


BUILD = """
import sys, hashlib
from pathlib import Path
from scaling_lab.data.stdlib import stdlib_corpus
print("ready", flush=True)
sys.stdin.readline()
corpus = stdlib_corpus(Path(sys.argv[1]))
print(corpus.facts.sha256, hashlib.sha256(corpus.tokens.data).hexdigest())
"""


def test_processes_that_build_at_once_agree(tmp_path):
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", BUILD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(3)
    ]
    assert [job.stdout.readline() for job in jobs] == ["ready\n"] * 3
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    answers = [job.communicate(timeout=120)[0].split() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert {value for answer in answers for value in answer} == {stdlib_corpus(None).facts.sha256}
    assert [path.suffix for path in tmp_path.iterdir()] == [".tokens"]

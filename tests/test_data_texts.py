"""The texts: the standard library's source, pydoc's English, and the user's files as bytes or through a tokenizer."""

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from experiments import experiment
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from scaling_lab.data import Source, open_source

ROOT = Path(__file__).parents[1]
STDLIB = Path(sysconfig.get_path("stdlib"))
ENGLISH = "\n".join(topics.values())


def opened(source: str, cache: Path | None = None, vocab=256, sequence=64, **keys) -> Source:
    keys = {f"data.{key}": str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    return open_source(experiment(data=source, **keys).data, vocab, sequence, cache)


def content(source: Source) -> bytes:
    assert source.train.tokens is source.validation.tokens
    return bytes(source.train.tokens[:])


def test_stdlib_is_the_source_that_every_python_has():
    source = opened("stdlib")
    text = content(source)
    assert (STDLIB / "argparse.py").read_bytes() + b"\n" + (STDLIB / "ast.py").read_bytes() in text
    assert source.corpus["sha256"] == hashlib.sha256(text).hexdigest()
    assert source.corpus["bytes"] == source.corpus["tokens"] == len(text) > 5_000_000
    assert source.corpus["files"] > 300
    assert source.corpus["train_tokens"] == int(len(text) * 0.95)
    assert source.corpus["train_tokens"] + source.corpus["validation_tokens"] == len(text)
    # A build's own settings and what distributions leave out would tie the corpus to one installation.
    for left_out in ("test/test_os.py", "idlelib/run.py", "tkinter/__init__.py"):
        if (STDLIB / left_out).exists():
            assert (STDLIB / left_out).read_bytes() not in text
    assert not [file for file in STDLIB.glob("_sysconfigdata*.py") if file.read_bytes() in text]


def test_stdlib_is_the_same_with_and_without_the_cache(tmp_path):
    records = [opened("stdlib", cache).corpus for cache in (None, tmp_path, tmp_path)]
    assert records[0] == records[1] == records[2]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_warm_cache_opens_no_source_file(tmp_path):
    opened("stdlib", tmp_path)
    code = (
        "import sys; from pathlib import Path; from scaling_lab.data.stdlib import stdlib_corpus\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: event == 'open' and opened.append(str(args[0])))\n"
        "stdlib_corpus(Path(sys.argv[1]))\n"
        "print('\\n'.join(opened))"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout.split()
    assert [line for line in lines if line.startswith(str(tmp_path))]
    assert not [line for line in lines if line == str(STDLIB / "argparse.py")]


def test_english_is_pydocs_topics_split_as_nanogpt_splits():
    source = opened("english")
    data = ENGLISH.encode()
    assert content(source) == data
    assert source.train.stop == int(len(data) * 0.9) == source.validation.start
    assert source.validation.stop == len(data) > 300_000


@pytest.fixture
def folder(tmp_path):
    """Three topics of pydoc as files at different depths, and what must not be read: a hidden folder and a hidden file."""
    root = tmp_path / "texts"
    for name, topic in [("b.txt", "assert"), ("a/deep/c.md", "lambda"), ("d", "in"), (".git/x.txt", "if"), (".hidden", "if")]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(topics[topic], encoding="utf-8")
    return root


def test_a_file_is_read_as_its_bytes(folder):
    source = opened("text", path=folder / "b.txt")
    assert content(source) == topics["assert"].encode()
    assert source.corpus["files"] == 1


def test_a_folder_is_all_its_files_in_order_joined_by_a_newline(folder):
    source = opened("text", path=folder)
    assert content(source) == "\n".join([topics["lambda"], topics["assert"], topics["in"]]).encode()
    assert source.corpus["files"] == 3


def test_a_glob_chooses_files_at_any_depth(folder):
    source = opened("text", path=str(folder / "**" / "*.[mt][dx]*"))
    assert content(source) == "\n".join([topics["lambda"], topics["assert"]]).encode()


def test_where_a_folder_stands_does_not_change_its_text(folder, tmp_path):
    before = opened("text", path=folder).corpus
    assert opened("text", path=folder.rename(tmp_path / "elsewhere")).corpus == before


def test_a_held_out_file_leaves_the_text_whole(folder):
    source = opened("text", path=folder / "b.txt", validation_path=folder / "d")
    held_out = topics["in"].encode()
    assert bytes(source.train.tokens[:]) == topics["assert"].encode()
    assert source.train.stop == source.corpus["train_tokens"] == len(topics["assert"].encode())
    assert bytes(source.validation.tokens[:]) == held_out
    assert source.corpus["validation"] == {
        "sha256": hashlib.sha256(held_out).hexdigest(),
        "bytes": len(held_out),
        "tokens": len(held_out),
        "files": 1,
        "documents": 1,
    }


def test_an_edited_file_is_read_again_through_the_cache(folder, tmp_path):
    cache = tmp_path / "cache"
    before = opened("text", cache, path=folder)
    (folder / "b.txt").write_text(topics["class"], encoding="utf-8")
    after = opened("text", cache, path=folder)
    assert topics["class"].encode() in content(after)
    assert topics["assert"].encode() in content(before)
    assert len(os.listdir(cache)) == 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A byte-level BPE of 400 tokens trained here on pydoc's English, which begins each text with `<s>`."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    built.train_from_iterator([ENGLISH[:60_000]], trainer)
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    built.save(str(path))
    return path


def test_a_tokenizer_encodes_each_file_with_its_special_tokens(folder, tokenizer):
    source = opened("text", path=folder, tokenizer=tokenizer, vocab=400)
    encoder = Tokenizer.from_file(str(tokenizer))
    expected = [id for topic in ("lambda", "assert", "in") for id in encoder.encode(topics[topic]).ids]
    assert source.train.tokens[:].tolist() == expected
    assert expected.count(0) == 3
    assert source.corpus["tokens"] == len(expected) < source.corpus["bytes"]
    assert source.corpus["bytes"] == sum(len(topics[topic].encode()) for topic in ("lambda", "assert", "in"))
    assert source.corpus["sha256"] == hashlib.sha256(np.array(expected, "<u2").tobytes()).hexdigest()


def test_encoded_text_is_cached_apart_from_its_bytes(folder, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    first = opened("text", cache, path=folder, tokenizer=tokenizer, vocab=400)
    opened("text", cache, path=folder)
    again = opened("text", cache, path=folder, tokenizer=tokenizer, vocab=400)
    assert again.corpus == first.corpus
    assert (again.train.tokens == first.train.tokens).all()
    assert len(os.listdir(cache)) == 2


def test_byte_tokens_do_not_import_tokenizers():
    code = (
        "import sys; from scaling_lab.data import open_source\n"
        "from scaling_lab.data.text import text_corpus\n"
        "text_corpus(sys.argv[1], 'data.path', None, None)\n"
        "print([name for name in ('tokenizers', 'jax', 'torch', 'hydra', 'wandb') if name in sys.modules])"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(STDLIB / "this.py")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout == "[]\n"

"""Wrong requests for data: each is one message that says what failed, with which values, and which key to change."""

from pathlib import Path

import numpy as np
import pytest
from experiments import CONF, experiment

from scaling_lab.data import check_request, open_source
from scaling_lab.errors import ConfigError

ZEN = b"Beautiful is better than ugly."  # 30 bytes, the largest 117 ("u"), then "y" 121


def refusal(source: str, vocab=256, sequence=4, **keys) -> str:
    keys = data_keys(keys)
    with pytest.raises(ConfigError) as caught:
        open_source(experiment(data=source, **keys).data, vocab, sequence)
    return str(caught.value)


def data_keys(keys) -> dict:
    return {f"data.{key}": str(value) if isinstance(value, Path) else value for key, value in keys.items()}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONF / "data").glob("*.yaml")))
def test_every_preset_is_understood_and_says_what_it_is_for(preset):
    assert experiment(data=preset).data.source
    lines = (CONF / "data" / f"{preset}.yaml").read_text().splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["# For", "# Command", "# Expect"]


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_a_source_of_files_without_a_path_is_refused(source):
    assert f"data.path is missing: data.source={source}" in refusal(source)


@pytest.mark.parametrize(
    ("source", "key", "value", "able"),
    [
        ("stdlib", "path", "x.txt", "text or tokens"),
        ("english", "tokenizer", "t.json", "text"),
        ("synthetic", "validation_path", "val.bin", "text or tokens"),
        ("stdlib", "dtype", "uint16", "tokens"),
        ("text", "document_end", 0, "tokens"),
    ],
)
def test_a_key_without_a_use_is_refused_with_the_source_that_has_one(source, key, value, able):
    message = refusal(source, **{"path": "x.txt"} if source == "text" else {}, **{key: value})
    assert f"data.{key}={value}: data.source={source} has no use for it" in message
    assert message.endswith(f"or choose data={able}")


def test_a_missing_file_is_named(tmp_path):
    assert refusal("text", path=tmp_path / "no.txt") == f"data.path={tmp_path}/no.txt: no such file or folder"
    assert f"data.path={tmp_path}/no.bin: no such file" in refusal("tokens", path=tmp_path / "no.bin")
    path = written(tmp_path / "yes.txt", ZEN)
    assert "data.validation_path" in refusal("text", path=path, validation_path=tmp_path / "no.txt")


def test_a_glob_or_folder_without_files_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert f"data.path={tmp_path}/*.txt: no file matches" in refusal("text", path=tmp_path / "*.txt")
    assert f"data.path={tmp_path}/empty: the folder holds no files" in refusal("text", path=tmp_path / "empty")


def test_a_file_that_is_not_utf8_is_named_with_the_place(tmp_path):
    written(tmp_path / "good.txt", ZEN)
    written(tmp_path / "latin.txt", "na\u00efve".encode("latin-1"))
    message = refusal("text", path=tmp_path)
    assert f"{tmp_path}/latin.txt is not UTF-8 (byte 0xef at offset 2)" in message
    assert f"data.path='{tmp_path}/*.txt'" in message


def test_tokens_beyond_the_vocabulary_are_refused_with_both_numbers(tmp_path):
    path = written(tmp_path / "zen.txt", ZEN)
    message = refusal("text", vocab=121, path=path)
    assert "the tokens go up to 121, but model.vocab=121 ends at 120: set model.vocab to at least 122" in message
    open_source(experiment(data="text", **{"data.path": str(path)}).data, 122, 4)


def test_held_out_tokens_beyond_the_vocabulary_are_refused_too(tmp_path):
    train, held_out = written(tmp_path / "train.txt", ZEN), written(tmp_path / "val.txt", "\u00a7 5".encode())
    assert refusal("text", vocab=128, path=train, validation_path=held_out).startswith("data.validation_path: the tokens go up")


def test_a_text_shorter_than_one_row_is_refused(tmp_path):
    path = written(tmp_path / "zen.txt", ZEN)
    message = refusal("text", sequence=30, path=path, validation_fraction=0.0)
    assert "has 30 tokens, fewer than the 31 of one row (workload.sequence=30" in message
    assert "set workload.sequence to at most 29" in message
    shipped = {"data.path": str(path), "data.validation_fraction": 0.0}
    assert open_source(experiment(data="text", **shipped).data, 256, 29).num_train_samples == 1
    assert "has 0 tokens" in refusal("text", path=written(tmp_path / "empty.txt", b""))


def test_a_held_out_share_too_small_for_a_label_is_refused(tmp_path):
    # 0.01 of 30 tokens: the border is at int(29.7) = 29, one token is left.
    message = refusal("text", path=written(tmp_path / "zen.txt", ZEN), validation_fraction=0.01)
    assert "data.validation_fraction=0.01: the validation split has 1 tokens" in message


def test_held_out_files_that_are_trained_on_are_refused(tmp_path):
    written(tmp_path / "a.txt", ZEN)
    held_out = written(tmp_path / "val.txt", ZEN)
    message = refusal("text", path=tmp_path, validation_path=held_out)
    assert f"share 1 file(s), such as {held_out}" in message
    raw = written(tmp_path / "ids.bin", ZEN)
    assert "must not be trained on" in refusal("tokens", vocab=2**16, path=raw, validation_path=raw)


def test_a_tokenizer_that_is_missing_or_no_tokenizer_is_refused(tmp_path):
    path = written(tmp_path / "zen.txt", ZEN)
    assert f"data.tokenizer={tmp_path}/no.json: no such file" in refusal("text", path=path, tokenizer=tmp_path / "no.json")
    wrong = written(tmp_path / "wrong.json", b'{"model": 1}')
    assert f"data.tokenizer={wrong}: not a tokenizer.json" in refusal("text", path=path, tokenizer=wrong)


def test_a_raw_file_needs_its_dtype(tmp_path):
    path = written(tmp_path / "ids.bin", ZEN)
    assert "set data.dtype=uint16 (nanoGPT) or uint32" in refusal("tokens", path=path, dtype=None)


def ids(folder: Path, *values: int) -> Path:
    np.array(values, np.uint16).tofile(folder / "ids.bin")
    return folder / "ids.bin"


def test_packed_ids_need_the_id_that_ends_a_document(tmp_path):
    message = refusal("tokens", path=ids(tmp_path, *range(99)), pack=True)
    assert message.startswith("data.document_end is missing: data.pack=true")
    assert message.endswith("set data.document_end=ID (nanoGPT writes 50256), or data.pack=false")


def test_the_end_of_documents_is_refused_where_nothing_is_packed(tmp_path):
    message = refusal("tokens", path=ids(tmp_path, *range(99)), document_end=7)
    assert message == ("data.document_end=7: data.pack=false has no use for it; set data.document_end=null, or data.pack=true")


@pytest.mark.parametrize("end", [98, 99, 70000])
def test_an_id_that_never_ends_a_document_is_refused(tmp_path, end):
    # The file holds 0..98: 98 ends nothing but the file, 99 is not there, 70,000 fits into no uint16.
    message = refusal("tokens", path=ids(tmp_path, *range(99)), pack=True, document_end=end)
    assert f"data.document_end={end}: data.path={tmp_path}/ids.bin is one document of 99 tokens" in message
    assert message.endswith("or data.pack=false data.document_end=null")


@pytest.mark.parametrize(("content", "size"), [(ZEN + b"!", 31), (b"", 0)])
def test_a_raw_file_of_a_wrong_size_is_refused(tmp_path, content, size):
    message = refusal("tokens", path=written(tmp_path / "ids.bin", content))
    assert f"{size} bytes are no array of uint16 (2 bytes each)" in message


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(9, np.float32), "float32 of shape [9]"),
        (np.zeros((3, 3), np.uint16), "uint16 of shape [3, 3]"),
        (np.array([1, -100, 2] * 9), "the negative id -100"),
    ],
)
def test_an_npy_of_anything_but_ids_is_refused(tmp_path, array, says):
    np.save(tmp_path / "ids.npy", array)
    assert says in refusal("tokens", path=tmp_path / "ids.npy", dtype=None)


def test_an_npy_of_another_dtype_than_asked_for_is_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(99, dtype=np.uint32))
    assert "data.dtype=uint16 but the file says uint32" in refusal("tokens", path=tmp_path / "ids.npy")


def test_a_file_that_only_ends_in_npy_is_refused(tmp_path):
    path = written(tmp_path / "ids.npy", ZEN)
    assert f"data.path={path}: not a .npy array" in refusal("tokens", path=path, dtype=None)
    assert "not a .npy array" in refusal("tokens", path=written(tmp_path / "empty.npy", b""), dtype=None)


@pytest.mark.parametrize(
    ("source", "keys", "words"),
    [
        ("text", {}, "data.path is missing"),
        ("stdlib", {"path": "x.txt"}, "has no use for it"),
        ("text", {"path": "/gone"}, "no such file or folder"),
        ("text", {"path": "unread", "validation_path": "/gone"}, "data.validation_path=/gone"),
        ("text", {"path": "unread", "tokenizer": "/gone.json"}, "data.tokenizer=/gone.json: no such file"),
        ("text", {"path": "unread", "validation_path": "unread"}, "must not be trained on"),
        ("tokens", {"path": "/gone.bin"}, "no such file"),
        ("tokens", {"path": "unread", "dtype": None}, "set data.dtype=uint16"),
        ("tokens", {"path": "unread", "pack": True}, "data.document_end is missing"),
    ],
)
def test_what_keys_and_missing_files_show_is_refused_without_reading_any(tmp_path, monkeypatch, source, keys, words):
    (tmp_path / "unread").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(ConfigError) as caught:
        check_request(experiment(data=source, **data_keys(keys)).data)
    assert words in str(caught.value)


def test_a_right_request_is_not_refused_whatever_the_file_holds(tmp_path):
    check_request(experiment(data="text", **{"data.path": str(written(tmp_path / "empty.txt", b""))}).data, 50)
    for preset in ("synthetic", "stdlib", "english"):
        check_request(experiment(data=preset).data, 50)


def test_an_evaluation_without_held_out_data_is_refused_where_nothing_could_be_held_out():
    with pytest.raises(ConfigError, match=r"workload.evaluation.every=50, but data.source=stdlib has no validation split"):
        check_request(experiment(**{"data.validation_fraction": 0.0}).data, 50)

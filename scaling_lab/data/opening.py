"""From the config to a source: which corpus, where it is split, whether model and workload can use it.

Owns the errors that only reading shows; `requests` has the others.
"""

from __future__ import annotations

from pathlib import Path

from scaling_lab.data.corpus import Corpus
from scaling_lab.data.requests import check_request
from scaling_lab.data.source import Source, Split
from scaling_lab.data.stdlib import english_corpus, stdlib_corpus
from scaling_lab.data.synthetic import synthetic_corpus
from scaling_lab.data.text import text_corpus
from scaling_lab.data.token_file import token_corpus
from scaling_lab.errors import ConfigError
from scaling_lab.plan.experiment import DataConfig


def open_source(config: DataConfig, vocab: int, sequence: int, cache_folder: Path | None = None) -> Source:
    """The rows of a job. vocab: the model's; sequence: tokens in a row; paths in the config are absolute.

    cache_folder: where built corpora are kept between jobs; None builds them each time. Raises ConfigError for whatever is
    wrong with the keys or the files.
    """
    check_request(config)
    corpus = _corpus(config, "path", vocab, cache_folder)
    held_out = _corpus(config, "validation_path", vocab, cache_folder) if config.validation_path else None
    _check_vocab(corpus, vocab, "path")
    _check_documents(corpus, config)
    if held_out:
        _check_vocab(held_out, vocab, "validation_path")
    train, validation = _splits(corpus, held_out, config)
    _check_length(train, validation, config, sequence)
    record = {
        "source": config.source,
        **corpus.record,
        "train_tokens": train.stop - train.start,
        "validation_tokens": validation.stop - validation.start,
        "validation": held_out.record if held_out else None,
    }
    return Source(record, train, validation, sequence, config.seed, config.shuffle, config.ragged)


def _check_documents(corpus: Corpus, config: DataConfig) -> None:
    """A wrong id would pack nothing, and nobody would notice."""
    if config.document_end is not None and corpus.borders and corpus.borders.count == 1:
        raise ConfigError(
            f"data.document_end={config.document_end}: data.path={config.path} is one document of {len(corpus.tokens)} tokens, "
            f"since no token but perhaps its last is {config.document_end}; set data.document_end to the id that ends its "
            f"documents, or data.pack=false data.document_end=null"
        )


def _corpus(config: DataConfig, key: str, vocab: int, cache_folder: Path | None) -> Corpus:
    path = getattr(config, key)
    if config.source == "synthetic":
        return synthetic_corpus(config.seed, vocab)
    if config.source == "stdlib":
        return stdlib_corpus(cache_folder)
    if config.source == "english":
        return english_corpus()
    if config.source == "text":
        return text_corpus(path, f"data.{key}", config.tokenizer, cache_folder)
    return token_corpus(path, f"data.{key}", config.dtype, config.document_end, cache_folder)


def _check_vocab(corpus: Corpus, vocab: int, key: str) -> None:
    largest = corpus.facts.largest
    if largest >= vocab:
        raise ConfigError(
            f"data.{key}: the tokens go up to {largest}, but model.vocab={vocab} ends at {vocab - 1}: set model.vocab to at "
            f"least {largest + 1}, or choose another data.path, data.tokenizer or data.dtype"
        )


def _splits(corpus: Corpus, held_out: Corpus | None, config: DataConfig) -> tuple[Split, Split]:
    """Training and validation: the validation file, or else the last validation_fraction of the tokens (nanoGPT's rounding)."""
    total = len(corpus.tokens)
    if held_out:
        return _split(corpus, 0, total, True, config), _split(held_out, 0, len(held_out.tokens), False, config)
    border = int(total * (1 - config.validation_fraction))
    return _split(corpus, 0, border, True, config), _split(corpus, border, total, False, config)


def _split(corpus: Corpus, start: int, stop: int, whole: bool, config: DataConfig) -> Split:
    return Split(corpus.tokens, start, stop, whole, corpus.borders if config.pack else None)


def _check_length(train: Split, validation: Split, config: DataConfig, sequence: int) -> None:
    tokens = train.stop - train.start
    if not train.num_samples(sequence):
        shorter = f", set workload.sequence to at most {tokens - 1}" if tokens > 1 else ""
        raise ConfigError(
            f"data.source={config.source}: the training split has {tokens} tokens, fewer than the {sequence + 1} of one row "
            f"(workload.sequence={sequence} and its last label): give more text{shorter}, or lower "
            f"data.validation_fraction={config.validation_fraction}"
        )
    asked = config.validation_path or config.validation_fraction
    if asked and not validation.num_samples(sequence):
        key, nothing = ("validation_path", "null") if config.validation_path else ("validation_fraction", "0.0")
        raise ConfigError(
            f"data.{key}={asked}: the validation split has {validation.stop - validation.start} tokens, and 2 are the fewest "
            f"that hold a label; give more text, or set data.{key}={nothing} for no validation"
        )

"""What is wrong with a request for data that its keys and the mere existence of its files can show. Reads no file.

So it costs nothing to ask before anything starts; what only the contents show is found where they are read.
"""

from __future__ import annotations

import os

from scaling_lab.data.text import check_tokenizer, files_of
from scaling_lab.data.token_file import check_raw_dtype, check_token_file
from scaling_lab.errors import ConfigError
from scaling_lab.plan.experiment import DataConfig

_KEYS = {
    "text": ("path", "validation_path", "tokenizer"),
    "tokens": ("path", "validation_path", "dtype", "document_end"),
}


def check_request(config: DataConfig, evaluation_every: int = 0) -> None:
    """Raise ConfigError for keys that contradict each other and for files that are not there. Paths are absolute.

    evaluation_every: workload.evaluation.every, which asks for held-out data
    """
    _check_keys(config)
    _check_document_end(config)
    _check_files(config)
    _check_overlap(config)
    if evaluation_every and not config.validation_fraction and config.validation_path is None:
        raise no_validation(config, evaluation_every)


def no_validation(config: DataConfig, evaluation_every: int) -> ConfigError:
    """The error of a job that is to be evaluated and has nothing held out."""
    return ConfigError(
        f"workload.evaluation.every={evaluation_every}, but data.source={config.source} has no validation split. "
        f"Set data.validation_fraction above 0, data.validation_path, or workload.evaluation.every=0."
    )


def _check_keys(config: DataConfig) -> None:
    used = _KEYS.get(config.source, ())
    if used and not config.path:
        raise ConfigError(f"data.path is missing: data.source={config.source} reads files; set data.path=PATH")
    for key in ("path", "validation_path", "tokenizer", "dtype", "document_end"):
        if getattr(config, key) is not None and key not in used:
            able = " or ".join(source for source, keys in _KEYS.items() if key in keys)
            raise ConfigError(
                f"data.{key}={getattr(config, key)}: data.source={config.source} has no use for it; "
                f"set data.{key}=null, or choose data={able}"
            )


def _check_document_end(config: DataConfig) -> None:
    """Ids on disk do not say where a document ends, and only packing asks."""
    if config.source == "tokens" and config.pack and config.document_end is None:
        raise ConfigError(
            "data.document_end is missing: data.pack=true needs the id that ends a document in data.source=tokens; set "
            "data.document_end=ID (nanoGPT writes 50256), or data.pack=false"
        )
    if config.document_end is not None and not config.pack:
        raise ConfigError(
            f"data.document_end={config.document_end}: data.pack=false has no use for it; set data.document_end=null, or "
            f"data.pack=true"
        )


def _check_files(config: DataConfig) -> None:
    for key in ("path", "validation_path"):
        path = getattr(config, key)
        if path is None:
            continue
        if config.source == "tokens":
            check_token_file(path, f"data.{key}")
            check_raw_dtype(path, f"data.{key}", config.dtype)
        else:
            files_of(path, f"data.{key}")
    check_tokenizer(config.tokenizer)


def _check_overlap(config: DataConfig) -> None:
    """A folder trained on often holds the held-out file too."""
    if config.path is None or config.validation_path is None:
        return
    train, held_out = (
        {os.path.realpath(file) for file in files_of(path, key)}
        for path, key in ((config.path, "data.path"), (config.validation_path, "data.validation_path"))
    )
    if both := sorted(train & held_out):
        raise ConfigError(
            f"data.path={config.path} and data.validation_path={config.validation_path} share {len(both)} file(s), such as "
            f"{both[0]}: held-out data must not be trained on; move it, or set data.validation_path=null"
        )

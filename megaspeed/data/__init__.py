"""From text on disk to the rows that a rank trains on.

Sources of text become files, documents, and a validation split; a tokenizer turns the documents
into token files, which are prepared once for each machine and mapped into memory; other sources
are token files already. A mixture says in which shares they are drawn from, and the sampler which
tokens sample i is; the loaders cut the samples of a step into one data-parallel rank's
micro-batches. Nothing here communicates between processes.

The loaders and the micro-batch need torch and are imported when they are first asked for, so that
checking a configuration's data does not wait for torch to load.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megaspeed.data.errors import DataError
from megaspeed.data.prepare import prepare_corpus
from megaspeed.data.prepared import PreparedCorpus
from megaspeed.data.selection import find_problems
from megaspeed.data.tokenizer.text_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from megaspeed.data.stream.loader import LoaderShape, TrainingLoader, ValidationLoader
    from megaspeed.data.stream.micro_batch import NOT_COUNTED, MicroBatch

_NEED_TORCH = {
    "LoaderShape": "megaspeed.data.stream.loader",
    "TrainingLoader": "megaspeed.data.stream.loader",
    "ValidationLoader": "megaspeed.data.stream.loader",
    "MicroBatch": "megaspeed.data.stream.micro_batch",
    "NOT_COUNTED": "megaspeed.data.stream.micro_batch",
}

__all__ = [
    "NOT_COUNTED",
    "DataError",
    "LoaderShape",
    "MicroBatch",
    "PreparedCorpus",
    "TrainingLoader",
    "ValidationLoader",
    "find_problems",
    "load_tokenizer",
    "prepare_corpus",
]


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

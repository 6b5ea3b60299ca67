"""What stands beside the state in a run's checkpoints, so that each is a model one can take away.

    the run's tokenizer                          every checkpoint has it
    generation_config.json of an imported model  every one, as long as the tokenizer is the same

That file names tokens by their ids, and another tokenizer's ids are other tokens.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from megaspeed.checkpoint.tokenizer_files import GENERATION, TOKENIZER
from megaspeed.data.tokenizer.text_tokenizer import TextTokenizer


def generation_file(checkpoint: Path, tokenizer_fingerprint: str | None) -> dict[str, bytes]:
    """Name -> content of what a run goes on to carry of a checkpoint; nothing with other tokens.

    Args:
        checkpoint: one that is whole, and that the run starts from or goes on from.
        tokenizer_fingerprint: of the tokenizer that the run's ids are of; None where no file says.
    """
    file, tokenizer = checkpoint / GENERATION, checkpoint / TOKENIZER
    if not (file.is_file() and tokenizer.is_file()):
        return {}
    # Which of its tokens ends a document is not in the fingerprint.
    saved = TextTokenizer(Tokenizer.from_file(str(tokenizer)), end_of_text=0)
    return {GENERATION: file.read_bytes()} if saved.fingerprint == tokenizer_fingerprint else {}

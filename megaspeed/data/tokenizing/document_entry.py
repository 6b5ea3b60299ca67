"""What is remembered of a document that was read: a line, and the lines' hash is the corpus's.

    text of a document  -->  sha256 as it goes by  -->  line of (name, size, sha256)
    all the lines       -->  sha256                -->  fingerprint of the corpus

The lines are kept on the disk until the end, so that work that was cut off comes to the same
fingerprint as training on the text directly.
"""

from __future__ import annotations

import hashlib

from megaspeed.data.text.documents import document_line

DocumentEntry = bytes
"""The line of a document, its end included."""


class DocumentHash:
    """The document that is being read."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def update(self, text: str) -> None:
        """Goes on with the next text of the document."""
        content = text.encode("utf-8")
        self._digest.update(content)
        self._size_bytes += len(content)

    def entry(self, file_name: str) -> DocumentEntry:
        """The document's line, now that all of its text went by."""
        return document_line(file_name, self._size_bytes, self._digest.hexdigest())

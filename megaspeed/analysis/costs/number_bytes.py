"""Bytes of one number of each type."""

from collections.abc import Mapping
from types import MappingProxyType

from megaspeed.config.resolve import Precision

BYTES_OF: Mapping[Precision, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})

"""The families of models, one file each. To add one, write its file and name it here."""

from collections.abc import Mapping
from typing import Literal

from megaspeed.config.families.family import Family
from megaspeed.config.families.gpt2 import GPT2
from megaspeed.config.families.llama import LLAMA
from megaspeed.config.families.mistral import MISTRAL
from megaspeed.config.families.qwen2 import QWEN2
from megaspeed.config.families.qwen3 import QWEN3

FamilyName = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"]

FAMILIES: Mapping[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}

"""Every model shape that the tests of this folder use, and Hugging Face's model of it."""

import pytest
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from tests.model.documents.packed_rows import SHAPES
from tests.model.stock_models import stock_of


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    shape: ModelConfig = request.param
    return shape


@pytest.fixture
def stock(config: ModelConfig) -> PreTrainedModel:
    return stock_of(config)

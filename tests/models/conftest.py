"""Fixtures of several tests of models."""

import pytest
from transformers.utils import logging


@pytest.fixture
def quiet():
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)

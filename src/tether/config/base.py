"""The base of every configuration section."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Quantization = Literal["4bit", "8bit"]
"""How many bits the weights of linear layers are held in."""


class Section(BaseModel):
    """A frozen group of keys that refuses unknown ones; a string under each field documents it everywhere."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

"""Weights in the layout of transformers: which tensor is which (`names`), into a mesh (`reading`), and out (`writing`).

`config.json` is read and written by `configs/hugging_face.py`.
"""

from models.hugging_face.reading import Weights
from models.hugging_face.writing import write

__all__ = ["Weights", "write"]

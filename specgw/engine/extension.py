"""Loads operators that were compiled from C beside this file, where a compiler was there."""

import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch  # noqa: F401  (loads the OpenMP runtime that the operators use)

logger = logging.getLogger(__name__)

Signatures = Mapping[str, tuple[type, ...]]

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def load_operators(name: str, signatures: Signatures) -> dict[str, Callable[..., None]]:
    """Returns the operators of an extension; none where it was not built or cannot run."""
    files = [Path(__file__).with_name(f"{name}{suffix}") for suffix in EXTENSION_SUFFIXES]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return {}
    try:
        library = ctypes.CDLL(str(file), mode=os.RTLD_NOW)
    except OSError as error:  # such as no OpenMP runtime in this process
        logger.warning("compiled operators cannot be loaded", extra={"detail": str(error)})
        return {}
    if not library.specgw_is_supported():
        return {}
    if not all(hasattr(library, operator) for operator in signatures):
        logger.warning("compiled operators are of another version: install specgw again")
        return {}
    operators = {operator: getattr(library, operator) for operator in signatures}
    for operator, signature in signatures.items():
        operators[operator].argtypes, operators[operator].restype = signature, None
    return operators

"""Reads weights from safetensors files. Nothing that could run code is opened: no pickle."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specgw.errors import ConfigError
from specgw.model_files import weight_files


class Checkpoint:
    """The tensors of one model directory, each to be taken once by its name."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._device = device
        self._files = {name: file for file in weight_files(model_dir) for name in _names(file)}

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor on the device.

        Raises:
            ConfigError: if it is missing or of another shape.
        """
        file = self._files.pop(name, None)
        if file is None:
            raise ConfigError([f"{self._model_dir}: the tensor {name} is missing"])
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        if tensor.shape != shape:
            found, wanted = list(tensor.shape), list(shape)
            problem = f"the tensor {name} has shape {found}, config.json says {wanted}"
            raise ConfigError([f"{self._model_dir}: {problem}"])
        return tensor.to(device=self._device, dtype=self._dtype)

    @property
    def remaining(self) -> list[str]:
        """The names of the tensors that were not taken."""
        return list(self._files)


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"{file}: cannot be read as safetensors: {error}"]) from None

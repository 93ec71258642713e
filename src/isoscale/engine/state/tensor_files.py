"""Tensors as a .safetensors file, with the operating system's own errors where it cannot be written."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a file; a full disk is an OSError, of which safetensors tells only the number."""
    file = Path(path)
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata)
        file.chmod(mode)  # safetensors leaves a file that nobody else may read
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error

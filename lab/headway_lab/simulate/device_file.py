"""A device from a file."""

import msgspec

from headway.flags.named_files import bytes_of_file
from headway.flags.settings import ConfigurationError
from headway_lab.simulate.hardware import Accelerator
from headway_lab.simulate.model_shapes import ModelShape
from headway_proto.wording import one_line, shown


class DescribedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator, and the model that was measured on it."""

    accelerator: Accelerator
    model: ModelShape | None = None


def read_device(path: str) -> DescribedDevice:
    """Read a JSON file; other keys are ignored.

    Raises:
        ConfigurationError: the file is unreadable, or describes no accelerator.
    """
    try:
        return msgspec.json.decode(bytes_of_file(path, "--hardware-file") or b"", type=DescribedDevice)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigurationError(f"--hardware-file: {shown(path)}: {one_line(error)}") from None

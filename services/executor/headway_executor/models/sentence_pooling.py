"""The pooling that a checkpoint was trained for, as sentence-transformers keeps it.

Owns: modules.json and the pooling module's config.json. Must not know: how vectors are computed.
"""

from pathlib import Path, PurePosixPath

import msgspec

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import read_json_object
from headway_proto.pooling import NO_POOLING, POOL_CLS, POOL_LAST, POOL_MEAN
from headway_proto.wording import shown

MODULES_FILE = "modules.json"

_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES = {
    "cls": POOL_CLS,
    "mean": POOL_MEAN,
    "lasttoken": POOL_LAST,
}
_FLAGS = {
    "pooling_mode_cls_token": POOL_CLS,
    "pooling_mode_mean_tokens": POOL_MEAN,
    "pooling_mode_lasttoken": POOL_LAST,
}


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def default_pooling(directory: Path, without_modules: int) -> int:
    """Return the checkpoint's own pooling; ``NO_POOLING`` if it is not one of ours. ``without_modules``: it has none.

    Normalising is the client's choice, so it counts for nothing here.

    Raises:
        ModelFilesError: a file cannot be read.
    """
    path = directory / MODULES_FILE
    if not path.exists():
        return without_modules
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelFilesError(f"{path}: not a list of modules ({str(error)[:64]})") from None
    names = [module.type.rpartition(".")[2] for module in modules]
    poolings = [module for module, name in zip(modules, names, strict=True) if name == "Pooling"]
    if len(poolings) != 1 or not set(names).issubset(_KNOWN_MODULES):
        return NO_POOLING
    inside = PurePosixPath(poolings[0].path)
    if inside.is_absolute() or ".." in inside.parts:
        raise ModelFilesError(
            f"{path}: path {shown(poolings[0].path)} is not allowed; allowed: a folder of the checkpoint"
        )
    return _pooling_of(directory / inside / "config.json")


def _pooling_of(path: Path) -> int:
    fields = read_json_object(path)
    mode = fields.values.get("pooling_mode")
    if mode is not None:
        return _MODES.get(mode, NO_POOLING) if isinstance(mode, str) else NO_POOLING
    asked = [name for name, value in fields.values.items() if name.startswith("pooling_mode_") and value is True]
    return _FLAGS.get(asked[0], NO_POOLING) if len(asked) == 1 else NO_POOLING

"""An unpickler that calls nothing that a file names.

What a pickle may refer to is listed here: tensors, element types and plain containers are built by our own functions,
classes of the programs that write such files become fakes (`Inert`). Any other reference is an error that names it,
and is raised before the object that it would belong to is made.
"""

from __future__ import annotations

import pickle
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from mt_ckpt.pickles.inert_objects import Inert, inert_class
from mt_ckpt.pickles.limits import check_hash_costs, check_structure
from mt_core.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
UNTYPED = "UntypedStorage"
STORAGE_MODULES = frozenset({"torch", "torch.cuda", "torch.storage"})
INERT_PACKAGES = frozenset({"megatron", "transformer_engine", "apex", "deepspeed", "fp16"})
"""Packages whose classes stand in the arguments and optimizers of Megatron's checkpoints."""
INERT_NAMES = frozenset(
    {
        "_codecs.encode",
        "argparse.Namespace",
        "types.SimpleNamespace",
        "collections.defaultdict",
        "datetime.timedelta",
        "functools.partial",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "signal.Signals",
        "signal.SIGTERM",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy._core.numeric._frombuffer",
        "numpy.core.numeric._frombuffer",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.torch_version.TorchVersion",
    }
)
INERT_MODULES = frozenset(
    {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
    }
)
"""The classes of distributed checkpoints' own index."""
CONTAINERS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "torch.Size": tuple,
}
RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""What Python 2 called them, as older pickle protocols still do."""


@dataclass(frozen=True)
class StorageType:
    """The element type that a storage's class says; None: bytes."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class StorageReference:
    """A storage that the file keeps beside the pickle. dtype: None for bytes of no type.

    first: where a view begins within the storage `key`, in elements.
    """

    key: str
    dtype: torch.dtype | None
    first: int = 0


@dataclass(frozen=True)
class TensorReference:
    """A tensor: `offset` and `stride` in elements of its storage."""

    storage: StorageReference
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SafeUnpickler(pickle.Unpickler):
    """Reads one pickle of `stream`. origin: the file, for messages. Tensors become TensorReference.

    `load` raises CheckpointError for a pickle that refers to anything that is not listed above, is damaged, or
    describes an object past the limits of `structure`.
    """

    def __init__(self, stream: BinaryIO, origin: str) -> None:
        # utf-8: strings of Python 2 pickles (protocol 0 to 2) are bytes without an encoding; torch.load takes the same.
        super().__init__(stream, encoding="utf-8")
        self._stream, self._origin = stream, origin
        self._builders: Mapping[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_bytes,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "builtins.getattr": self._member,
            "copyreg._reconstructor": self._reconstructed,
        }

    def load(self) -> Any:
        # Before anything is built: a key is hashed as soon as it is put into a dictionary. The structure can only be
        # checked after loading.
        check_hash_costs(self._stream, self._origin)
        try:
            value = super().load()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle may fail in any way
            raise CheckpointError(f"{self._origin}: damaged: not a pickle of torch.save: {error}") from None
        check_structure(value, self._origin)
        return value

    # Every GLOBAL and STACK_GLOBAL of a pickle is looked up here; overriding it is the documented way to restrict them.
    def find_class(self, module: str, name: str) -> Any:
        module = RENAMED_MODULES.get(module, module)
        full = f"{module}.{name}"
        if full in self._builders:
            return self._builders[full]
        if full in CONTAINERS:
            return CONTAINERS[full]
        if module in STORAGE_MODULES and name in (*DTYPES, UNTYPED):
            return StorageType(DTYPES.get(name))
        # The attribute is looked up in torch alone and only element types are returned; nothing is called.
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full in INERT_NAMES or module in INERT_MODULES or module.partition(".")[0] in INERT_PACKAGES:
            # A new class each time: two pickles share no class, and nothing can be set on it that another would see.
            return inert_class(module, name)
        # The base class that copyreg._reconstructor names in protocol 0 and 1.
        if full == "builtins.object":
            return Inert
        raise self._refusal(f"it refers to {full}")

    def persistent_load(self, reference: Any) -> StorageReference:
        """("storage", its class, key, device, number of elements[, view: (key, first element, size)])"""
        if not isinstance(reference, tuple) or len(reference) < 5 or reference[0] != "storage":
            raise self._refusal(f"it refers to the outside by {reprlib.repr(reference)}")
        kind, key = reference[1], reference[2]
        if not isinstance(kind, StorageType):
            raise self._refusal(f"it has a storage of the kind {reprlib.repr(kind)}")
        if not isinstance(key, str | int):
            raise self._refusal(f"it has a storage named {reprlib.repr(key)}")
        # In the layout before torch 1.6 a storage may be a view: an offset within a larger storage.
        view = reference[5] if len(reference) > 5 else None
        return StorageReference(str(key), kind.dtype, int(view[1]) if view else 0)

    # -- what is built -------------------------------------------------------------------------------

    def _tensor(
        self, storage: Any, offset: int, shape: Sequence[int], stride: Sequence[int], *rest: Any
    ) -> TensorReference:
        return self._reference(storage, storage.dtype, offset, shape, stride)

    def _tensor_of_bytes(
        self,
        storage: Any,
        offset: int,
        shape: Sequence[int],
        stride: Sequence[int],
        requires_grad: bool,
        hooks: Any,
        dtype: torch.dtype,
        metadata: Any = None,
    ) -> TensorReference:
        return self._reference(storage, dtype, offset, shape, stride)

    def _reference(
        self, storage: Any, dtype: Any, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> TensorReference:
        sizes, steps = tuple(shape), tuple(stride)
        numbers = (offset, *sizes, *steps)
        # `type(number) is int`: a bool or a subclass is refused. torch has no negative strides.
        if not all(type(number) is int and number >= 0 for number in numbers) or len(sizes) != len(steps):
            raise self._refusal(f"it has a tensor of shape {sizes}, stride {steps}, offset {offset}")
        if not isinstance(storage, StorageReference) or not isinstance(dtype, torch.dtype):
            raise self._refusal("it has a tensor without a storage")
        return TensorReference(storage, dtype, offset + storage.first, sizes, steps)

    def _parameter(self, data: Any, *rest: Any) -> Any:
        return data

    def _member(self, owner: Any, name: Any) -> Inert:
        """Members of enumerations are written as getattr(class, name) by Python 3.11; nothing else may be."""
        # `owner is not Inert`: the base class stands for builtins.object, of which no member is named.
        if isinstance(owner, type) and issubclass(owner, Inert) and owner is not Inert and isinstance(name, str):
            return owner(name)
        raise self._refusal(f"it takes the attribute {name!r} of {owner!r}")

    def _reconstructed(self, kind: Any, base: Any, state: Any) -> Inert:
        if isinstance(kind, type) and issubclass(kind, Inert) and base is Inert:
            return kind()
        raise self._refusal(f"it makes an object of {kind!r}")

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._origin}: refused, nothing in it was executed: {reason}, which no checkpoint needs"
        )

"""Choice of implementations: the configured one, or for `auto` by device and dtype; and its assignment to models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from mt_core.errors import ConfigError
from mt_core.nn.kernels.catalogue import KERNELS, Implementation
from mt_core.nn.kernels.request import Feature, KernelName, KernelRequest

if TYPE_CHECKING:
    from torch import Tensor

    from mt_core.config.schema import Config
    from mt_core.parallel.context import ParallelContext


AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """str(choice) is a line for the log."""

    kernel: KernelName
    implementation: Implementation
    reason: str
    automatic: bool = False

    def load(self) -> Callable[..., Any]:
        """The function; imports what it is made of."""
        return self.implementation.function.load()

    def __str__(self) -> str:
        return f"{self.kernel}: {self.implementation.name} ({self.reason})"


def choose(kernel: KernelName, wanted: str, request: KernelRequest, section: str = "kernels") -> Choice:
    """The implementation named by `wanted`, or for "auto" the best one of ours.

    Raises ConfigError when the named one does not exist or cannot serve the request, with those that can.
    section: where the keys of kernels stand in the configuration.
    """
    # `auto` has a result for every request; a named implementation that cannot serve is an error and never replaced.
    if wanted == AUTO:
        return _automatic(kernel, request)
    known = {implementation.name: implementation for implementation in KERNELS[kernel]}
    if wanted not in known:
        raise ConfigError(f"{section}.{kernel}={wanted}: no such implementation; it can be {_either([AUTO, *known])}")
    # True or a sentence: `is not True`, since a sentence is true as well.
    answer = known[wanted].supports(request)
    if answer is not True:
        use = _either([AUTO, *able(kernel, request)])
        raise ConfigError(f"{section}.{kernel}={wanted} cannot serve ({request}): {answer}; use {use}")
    return Choice(kernel, known[wanted], f"as {section}.{kernel} says, for {request}")


def able(kernel: KernelName, request: KernelRequest) -> list[str]:
    """Names of the implementations that can serve."""
    return [i.name for i in KERNELS[kernel] if i.supports(request) is True]


def refusals(kernel: KernelName, request: KernelRequest) -> dict[str, str]:
    """implementation -> why it cannot serve, for those that cannot."""
    answers = {i.name: i.supports(request) for i in KERNELS[kernel]}
    return {name: str(answer) for name, answer in answers.items() if answer is not True}


def _automatic(kernel: KernelName, request: KernelRequest) -> Choice:
    """Ours on a GPU if it serves, else plain torch. Other packages' kernels round differently from one release to
    the next, so a run uses them only where its configuration names them."""
    known = {implementation.name: implementation for implementation in KERNELS[kernel]}
    if request.device_type != "cuda":
        return Choice(kernel, known["torch"], f"auto on {request.device_type}", automatic=True)
    if not known["triton"].automatic:
        return Choice(kernel, known["torch"], "auto: triton has not run on a GPU, and is used if named", automatic=True)
    answer = known["triton"].supports(request)
    # KERNELS has "torch" and "triton" for every kernel.
    if answer is True:
        return Choice(kernel, known["triton"], f"auto: {request}", automatic=True)
    return Choice(kernel, known["torch"], f"auto: triton cannot serve ({request}), {answer}", automatic=True)


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


class Kernels:
    """The kernels of one model: chosen while it is built, listed afterwards."""

    def __init__(self, wanted: Mapping[KernelName, str], device_type: str, dtype: str) -> None:
        """wanted: implementation by kernel; what it leaves out is "auto"."""
        self.wanted = wanted
        self.device_type = device_type
        self.dtype = dtype
        self.attention_backends: set[str] = set()
        """Backends of the layers that were built, with `auto` resolved; what builds them adds the names."""
        self._choices: dict[str, Choice] = {}
        self._notes: dict[str, None] = {}

    def pick(
        self, kernel: KernelName, *features: Feature, width: int = 0, plain: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """The function for this use of a kernel. Raises ConfigError as `choose` does.

        plain: what a caller has in plain torch, to be used in place of the reference where torch is chosen.
        """
        choice = self.choice_of(kernel, *features, width=width)
        # By its line for the log: layers of one kind are one entry.
        self._choices[str(choice)] = choice
        if plain is not None and choice.implementation.name == "torch":
            return plain
        return choice.load()

    def pick_fused(
        self, kernel: KernelName, *features: Feature, width: int = 0, joined: KernelName | None = None
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """The form `fused` of what `pick` gives for the same use; None: it has no such form.

        joined: the kernel that this form takes the place of as well. The two have to be of one implementation.
        """
        chosen = self.choice_of(kernel, *features, width=width).implementation
        # Not recorded as a pick: a fused form stands beside the plain one, which the caller picks too.
        if joined is not None and self.choice_of(joined, width=width).implementation.name != chosen.name:
            return None
        return None if chosen.fused is None else chosen.fused.load()

    def choice_of(self, kernel: KernelName, *features: Feature, width: int = 0) -> Choice:
        """What `pick` would give, which is not listed among the choices."""
        request = KernelRequest(
            device_type=self.device_type, dtype=self.dtype, width=width, features=frozenset(features)
        )
        return choose(kernel, self.wanted.get(kernel, AUTO), request)

    def note(self, line: str) -> None:
        """Add a line on what was chosen outside of the catalogue, such as the attention backend."""
        self._notes[line] = None

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    @property
    def picked(self) -> set[str]:
        return {choice.kernel for choice in self._choices.values()}

    def require_used(self, picked: Collection[str]) -> None:
        """Raises ConfigError for a kernel that was named and that is not among those that a run picked."""
        # `picked` is given, not self.picked: with pipeline stages another rank may be the one that uses a kernel.
        for kernel, wanted in self.wanted.items():
            if wanted != AUTO and kernel not in picked:
                use = ", ".join(sorted(picked)) or "none"
                raise ConfigError(
                    f"kernels.{kernel}={wanted}: nothing in this run uses that kernel; remove the key (used are: {use})"
                )

    @property
    def choices(self) -> list[Choice]:
        """One for each kind of use, in the order in which they were first requested."""
        return list(self._choices.values())


# -- assignment to models, losses and optimizers after they are built ----------------------------------

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class UsesKernels(Protocol):
    """A module, loss or optimizer that uses kernels with several implementations. The default is plain torch."""

    def use_kernels(self, kernels: Kernels) -> None:
        """Pick what it needs. Raises ConfigError when a named implementation cannot serve."""
        ...


def configured_kernels(config: Config, ctx: ParallelContext) -> Kernels:
    """What the section `kernels` selects, on the device and in the dtype of the run."""
    wanted = cast(Mapping[KernelName, str], config.kernels.model_dump())
    return Kernels(wanted, ctx.device.type, DTYPES[config.precision.dtype])


def use_kernels(parts: Iterable[object], kernels: Kernels) -> None:
    """Call `use_kernels` of each part that has it."""
    for part in parts:
        # hasattr, since isinstance of a Protocol costs 30 us in Python 3.11, and some models have 10,000 modules.
        if hasattr(part, "use_kernels"):
            cast(UsesKernels, part).use_kernels(kernels)

"""What each module of a model computes on a batch, and the gradient of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mt_ops.deep.noise import other_rounding


@dataclass
class Recording:
    """forward: output of each module, in the order in which they ended. backward: gradient of the loss with respect to
    that output, in the order of the forward pass. parameters: gradients by name. loss: of the batch."""

    forward: dict[str, Tensor] = field(default_factory=dict)
    backward: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0


@dataclass(frozen=True)
class RecordedModel:
    """model: in evaluation mode. logits: (tokens [batch, sequence]) -> logits [batch, sequence, vocabulary].

    name_of: of a module or parameter -> the name under which it is compared, None to leave it out.
    """

    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    name_of: Callable[[str], str | None] = lambda name: name


def record(recorded: RecordedModel, tokens: Tensor, *, twin: int | None = None) -> Recording:
    """Forward and backward pass of the mean cross-entropy of the next token. tokens: [batch, sequence].

    twin: number of one that computes with other rounding (`mt_ops.deep.noise`); None, the model as it is.
    """
    result, model = Recording(), recorded.model
    model.zero_grad(set_to_none=True)
    # The twin's hooks first: what they make of an output is what is recorded.
    with other_rounding(model, twin) if twin is not None else nullcontext(), _hooks(recorded, result):
        logits = recorded.logits(tokens)
        targets = tokens[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)
        loss.backward()
    result.forward["logits"], result.loss = logits.detach(), float(loss.detach())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (known := recorded.name_of(name)) is not None:
            result.parameters[known] = parameter.grad.detach().clone()
    return result


def update(model: nn.Module, rate: float) -> None:
    """A step of gradient descent, the same rule for every model."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)


@contextmanager
def _hooks(recorded: RecordedModel, result: Recording) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in recorded.model.named_modules():
            known = recorded.name_of(name) if name else None
            if known is not None:
                handle = module.register_forward_hook(_keep(known, result))
                stack.callback(handle.remove)
        yield


def _keep(name: str, result: Recording) -> Callable[[nn.Module, Any, Any], None]:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        result.forward[name] = tensor.detach().clone()
        if tensor.requires_grad:

            def keep_gradient(gradient: Tensor) -> None:
                result.backward[name] = gradient.detach().clone()

            tensor.register_hook(keep_gradient)

    return keep

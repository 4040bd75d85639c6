"""What is said to arguments that other libraries have and this one does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from ..accounting import calibration

P = ParamSpec("P")
R = TypeVar("R")

OPACUS = {
    "poisson_sampling": (
        'batches are Poisson draws; leave it out, or pass sampling="random_allocation" for passes'
        " over all records"
    ),
    "clipping": "the gradient is clipped over all parameters together; leave it out",
    "batch_first": "records are in dimension 0; leave it out",
    "criterion": "compute the loss in the loop, or pass loss=, which takes one record",
    "noise_generator": "pass generator= in the optimizer factory",
    "total_steps": "pass epochs=",
    "normalize_clipping": "max_grad_norm is in the units of the gradient; leave it out",
    "module_state_dict_kwargs": "leave it out",
    "optimizer_state_dict_kwargs": "leave it out",
    "torch_save_kwargs": "leave it out",
    "torch_load_kwargs": "no code in the file is run; leave it out",
    "secure_mode": (
        "noise is seeded with the operating system's entropy, in floating point, and there is no"
        " other mode; leave it out"
    ),
}
OF_NOISE_MULTIPLIERS = {
    "epochs": "pass steps = epochs * len(loader), which is epochs / sample_rate",
    "accountant": "it is priced by privacy loss distributions, the tightest there is; leave it out",
    "epsilon_tolerance": "the result is within 0.05 % of the smallest; leave it out",
}


def answered(answers: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that says what to write instead of an argument it does not have.

    Args:
        answers: a sentence for each argument that people try.

    Raises:
        TypeError: of the function: an argument that it does not have, or one without its name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for argument in kwargs:
                if argument in answers and argument not in signature.parameters:
                    raise TypeError(f"{name} has no {argument}=: {answers[argument]}.")
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                by_name = [
                    p.name
                    for p in signature.parameters.values()
                    if p.kind is p.KEYWORD_ONLY
                    and (p.default is p.empty or p.name == "target_epsilon")
                ]
                if "positional" in str(error) and by_name:
                    raise TypeError(
                        f"pass arguments by name: {name}({'=..., '.join(by_name)}=...)"
                    ) from None
                raise TypeError(f"{name}: {error}") from None
            return function(*args, **kwargs)

        return call

    return decorate


get_noise_multiplier = answered(OF_NOISE_MULTIPLIERS)(calibration.get_noise_multiplier)
get_num_steps = answered(OF_NOISE_MULTIPLIERS)(calibration.get_num_steps)

"""``python -m torch_dpbayes``: what is installed, and where to read on."""

from __future__ import annotations

import platform
import re
import sys
from importlib import import_module, metadata

import torch_dpbayes

_BESIDE = ("torch", "opacus", "pyro-ppl", "dp-accounting", "numpy", "scipy")


def main() -> None:
    """Print version, environment, public names and where the documentation is."""
    import torch

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [
        f"torch_dpbayes {torch_dpbayes.__version__}",
        f"Python        {platform.python_version()} on {platform.platform()}, {device}",
        "beside it     " + ", ".join(f"{name} {version(name)}" for name in _BESIDE),
        "",
        "public names  (import torch_dpbayes as dpb)",
    ]
    for name in torch_dpbayes.__all__:
        value = getattr(torch_dpbayes, name)
        if isinstance(value, type(sys)):
            inside = [n for n in dir(import_module(value.__name__)) if n[0] != "_"]
            lines.append(f"  dpb.{name}: {', '.join(n for n in inside if n != 'annotations')}")
        elif name != "__version__":
            first = (value.__doc__ or "").strip().partition(".")[0]
            plain = re.sub(r" ?:math:`[^`]*`|``", "", " ".join(first.split()))
            lines.append(f"  dpb.{name}: {plain}")
    lines += [
        "",
        "documentation README.md and docs/ of the source; help(dpb.PrivacyEngine) and alike",
        "a ledger      python -m torch_dpbayes.accounting budget.db",
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()

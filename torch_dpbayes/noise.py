"""The source of all Gaussian noise: no other module draws it.

A noise vector that is used twice does not protect: subtracting the two releases removes it. A
:class:`GaussianNoise` therefore draws from its own stream. By default the operating system gives
the stream's full state: torch's ``Generator.seed()`` uses only 32 bits on the CPU, and an attacker
can try all of them. A generator of the caller's gives a key for each release. The noise then comes
from a hash of the key and of the values that it hides (like the nonces of RFC 6979): a repeated run
is the same bit for bit, and a run that differs in any value gets independent noise. In one process
each position of such a generator is used at most once. Batches are drawn from such keys, too.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import ArgumentError, StateError
from .processes import after_fork, this_process

# used positions of callers' generators in this process: (what was drawn, digest)
_used_positions: set[tuple[str, bytes]] = set()

# torch's serialised Mersenne Twister: seed, position, 624 words of state in 64 bits each, caches
_CPU_STATE_BYTES = 5056
_CPU = torch.device("cpu")
_PIECE = 2**16  # numbers; 256 kB of float32
_TAIL = 5.0
_BEYOND_TAIL = float(torch.special.ndtr(torch.tensor(-_TAIL, dtype=torch.float64)))  # one-sided
_CPU_WORDS = slice(24, 24 + 8 * 624)
# the state without the given seed (the stream uses 32 bits of it) and a cached normal number
_CPU_PLACE = slice(8, _CPU_WORDS.stop)
_ENTROPY_BYTES = 8 + 4 * 624
# a source of global random numbers: a torch device, Python or NumPy
_Kind = torch.device | str
OF_RECORDS = ("python", "numpy")  # data sets draw from these, and from torch's
_ON_HOST: tuple[_Kind, ...] = (_CPU, *OF_RECORDS)


def stream_position(generator: torch.Generator) -> bytes:
    """Digest of the position of ``generator`` in its stream. Equal digests: the next random bits
    are equal.
    """
    state = generator.get_state()
    if state.numel() == _CPU_STATE_BYTES:
        state = state[_CPU_PLACE]
    return digest([state])


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose state comes from the operating system's entropy."""
    return _generator_from(os.urandom(_ENTROPY_BYTES), device)


def _generator_from(entropy: bytes, device: torch.device | str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(entropy[:8], "little", signed=True))
    state = generator.get_state()
    if state.numel() == _CPU_STATE_BYTES:
        words = np.frombuffer(entropy[8:], np.uint32).astype(np.uint64)
        state[_CPU_WORDS] = torch.from_numpy(words.view(np.uint8))
        generator.set_state(state)
    return generator


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's global random numbers inside the block, and restore their
    states afterwards.
    """
    before = [(put, get()) for get, put in map(_access, _ON_HOST)]
    try:
        for begin in (torch.manual_seed, random.seed, np.random.seed):
            begin(seed)
        yield
    finally:
        for put, state in before:
            put(state)


class PrivateRandomness:
    """While a block runs, torch's global random numbers come from a separate stream; if the block
    reads records, also Python's and NumPy's.

    A dropout mask, or an augmentation, is drawn for a place in the batch, and one added record
    moves the others to other places. These numbers must therefore be as secret as noise, although
    many programs seed torch with 0 or 42. After the block the program's own streams are restored.
    (A block that seeds torch itself has the numbers of that seed.)

    Args:
        generator: the caller's, for repeatable runs. The numbers come from a hash of its position,
            of the values that the block hides, and of how many blocks began at this position.
            None: fresh entropy from the operating system.
        rank: the rank of this process. Ranks with equal generators draw different masks.
    """

    def __init__(self, generator: torch.Generator | None = None, rank: int = 0) -> None:
        self._generator, self._rank = generator, rank
        self._streams: dict[_Kind, Any] = {}
        self._process = this_process()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy draws different numbers."""
        return PrivateRandomness, ()

    @contextmanager
    def __call__(self, devices: Iterable[_Kind], hides: Iterable[Tensor] = ()) -> Iterator[None]:
        """For the CPU and these devices; ``hides``: the values that the block computes with."""
        with _lock:
            if _private_now:  # one block inside another
                yield
                return
            kinds: set[_Kind] = {_CPU}
            for kind in devices:
                if isinstance(kind, str) or kind.type not in ("cpu", "meta"):
                    kinds.add(kind)
            self._begin(kinds, hides)
            access = {kind: _access(kind) for kind in kinds}
            before = [(put, get()) for get, put in access.values()]
            try:
                _private_now.append(self)
                for kind, (_, put) in access.items():
                    put(self._streams[kind])
                seed = torch.default_generator.initial_seed()
                yield
                for kind, (get, _) in access.items():
                    self._streams[kind] = get()
                if torch.default_generator.initial_seed() != seed:
                    self._streams.clear()
            except BaseException:
                self._streams.clear()
                raise
            finally:
                _private_now.clear()
                for put, state in before:
                    put(state)

    def _begin(self, kinds: set[_Kind], hides: Iterable[Tensor]) -> None:
        """Make missing streams; with a caller's generator, new ones for every block."""
        if self._generator is not None or this_process() != self._process:
            self._streams, self._process = {}, this_process()
        # Python and NumPy do not show whether the last block seeded them
        new = kinds - (self._streams.keys() - OF_RECORDS)
        if self._generator is None:
            for kind in new:
                self._streams[kind] = _stream_from(os.urandom(_ENTROPY_BYTES), kind)
            return
        position = stream_position(self._generator)
        number = _blocks_at[position] = _blocks_at.get(position, 0) + 1
        for kind in new:
            key = hashlib.shake_256(f"model {self._rank} {number} {kind}".encode() + position)
            for part in hides:
                key.update(digest([part], 64))
            self._streams[kind] = _stream_from(key.digest(_ENTROPY_BYTES), kind)


_private_now: list[PrivateRandomness] = []
_blocks_at: dict[bytes, int] = {}  # positions of callers' generators
_lock = threading.RLock()  # all threads share torch's global streams


def _begin_process() -> None:
    """In a forked child make a new lock: a thread of the parent may have held it at the fork."""
    global _lock
    _lock = threading.RLock()
    _private_now.clear()


after_fork(_begin_process)


def _stream_from(entropy: bytes, kind: _Kind) -> Any:
    if kind == "python":
        return random.Random(entropy[:32]).getstate()
    if kind == "numpy":
        return "MT19937", np.frombuffer(entropy[8:], np.uint32), 624  # 624: new words come next
    return _generator_from(entropy, kind).get_state()


def _access(kind: _Kind) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Functions that read and set the state of global random numbers."""
    if isinstance(kind, str):
        of_numpy = np.random.get_state, np.random.set_state
        return (random.getstate, random.setstate) if kind == "python" else of_numpy
    if kind.type == "cpu":
        return torch.default_generator.get_state, torch.default_generator.set_state
    module, of = torch.get_device_module(kind), () if kind.type == "mps" else (kind,)
    return partial(module.get_rng_state, *of), lambda state: module.set_rng_state(state, *of)


def seed_worker(seed: int) -> None:
    """Seed the global random numbers of a loader's worker. Torch uses 32 bits of the seed."""
    for kind in _ON_HOST:
        key = hashlib.shake_256(f"worker {seed} {kind}".encode())
        _, put = _access(kind)
        put(_stream_from(key.digest(_ENTROPY_BYTES), kind))


class GaussianNoise:
    """Independent standard Gaussian vectors; no vector is drawn twice.

    Args:
        generator: the caller's source of randomness, for runs that can be repeated bit for bit.
            None: fresh entropy from the operating system, on the device where the noise is needed.

    Raises:
        ValueError: this process already drew noise from a generator in the same state.

    **Privacy.** Nothing is released here. Anyone who knows the seed of the caller's generator can
    subtract the noise: keep the seed secret, or leave the generator out.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self._own: torch.Generator | None = None
        self._process = this_process()
        if generator is not None:
            _refuse_used("noise", stream_position(generator))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy draws different noise."""
        return GaussianNoise, ()

    def standard_normal(
        self,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        hides: Iterable[Tensor | str] = (),
    ) -> Tensor:
        """A fresh N(0, I) vector of length ``size``; ``hides`` as in :meth:`next_stream`."""
        vector = torch.zeros(size, dtype=dtype, device=device)
        add_gaussian(vector, 1.0, 1.0, self.next_stream(device, hides))
        return vector

    def require_usable(self, device: torch.device) -> None:
        """Raise what :meth:`next_stream` would, before a release is charged."""
        if self.generator is None:
            return
        if this_process() != self._process:
            raise StateError(
                "this noise generator was made in another process, and a forked copy repeats its"
                " parent's noise: build the optimizer in the forked process, or leave out"
                " generator=.",
                code="forked",
            )
        if self.generator.device.type != device.type:
            raise ArgumentError(
                f"generator= is on {self.generator.device}, the parameters on {device}: pass"
                f" torch.Generator(device={str(device)!r})"
            )
        _refuse_used("noise", stream_position(self.generator))

    def next_stream(self, device: torch.device, hides: Iterable[Tensor | str]) -> torch.Generator:
        """The random stream for the noise of the next release.

        ``hides``: all values that the release is computed from. With a caller's generator, two
        streams are equal only if all these values are equal.
        """
        if self.generator is None:
            if self._own is None or self._own.device != device or this_process() != self._process:
                self._own, self._process = fresh_generator(device), this_process()
            return self._own
        self.require_usable(device)
        return stream_of_key("noise", self.generator, hides, device)


def add_gaussian(target: Tensor, std: float, divisor: float, stream: torch.Generator) -> None:
    """target ← (target + std·ξ) / divisor with ξ ~ N(0, I), in place.

    On the CPU it works on pieces that fit into the cache, so the noise is not written to memory.
    """
    noise = None
    is_long = target.numel() > _PIECE and target.device.type == "cpu"
    for piece in target.split(_PIECE) if is_long else (target,):
        if noise is None or len(noise) != len(piece):
            noise = torch.empty_like(piece)
        torch.add(_normal_(noise, std / divisor, stream), piece, alpha=1.0 / divisor, out=piece)


def _normal_(vector: Tensor, std: float, stream: torch.Generator) -> Tensor:
    """N(0, std²I) in place, with its tails.

    Torch makes float32 normals from uniform numbers of 24 bits on the CPU and 32 bits on a GPU. So
    they end at √(2·24·log 2) = 5.77 or at 6.7: if a record moves a sum by one standard deviation,
    one result in a million would reveal it with certainty. Numbers beyond 5 (six in ten million)
    are therefore drawn again beyond 5, by the inverse distribution function in float64, which ends
    at 9.8.
    """
    vector.normal_(0.0, std, generator=stream)
    if vector.dtype == torch.float64 or not vector.numel():
        return vector
    if vector.is_cuda:
        return _with_tails(vector, std, stream)
    lowest, highest = torch.aminmax(vector)
    if max(-float(lowest), float(highest)) <= _TAIL * std:
        return vector
    (beyond,) = torch.where(vector.abs() > _TAIL * std)
    # in (0, 1]
    share = 1 - torch.rand(len(beyond), dtype=torch.float64, device=vector.device, generator=stream)
    lengths = -std * torch.special.ndtri(share * _BEYOND_TAIL)
    vector[beyond] = torch.copysign(lengths.to(vector.dtype), vector[beyond])
    return vector


def _with_tails(vector: Tensor, std: float, stream: torch.Generator) -> Tensor:
    """The same without counting the numbers beyond 5: the CPU would have to wait for the GPU.

    It handles up to m + t numbers, where m is their mean number and t = 12√m + 40. By Bernstein's
    inequality there are more with a probability below exp(-t²/(2m + 2t/3)), which is below 10⁻²⁵
    for every m. These would keep torch's value.
    """
    mean = 2 * _BEYOND_TAIL * len(vector)
    most = math.ceil(mean + 12 * math.sqrt(mean) + 40)
    places = torch.nonzero_static(vector.abs() > _TAIL * std, size=most).flatten()  # -1: none
    share = 1 - torch.rand(most, dtype=torch.float64, device=vector.device, generator=stream)
    lengths = -std * torch.special.ndtri(share * _BEYOND_TAIL)
    before = vector[places.clamp(min=0)]
    change = torch.copysign(lengths.to(vector.dtype), before) - before
    # the sum is exact for numbers of equal sign within a factor of two, as nearly all are
    return vector.index_add_(0, places.clamp(min=0), change.masked_fill(places < 0, 0.0))


def stream_of_key(
    what: str, generator: torch.Generator, parts: Iterable[Tensor | str], device: torch.device | str
) -> torch.Generator:
    """The generator for ``what``. Its seed is a hash of ``parts`` and of the next 256 bits of
    ``generator``, which advances by these bits only.

    If the streams of two callers overlap, their generators are still independent unless the
    positions are equal. Each position is used once in a process.
    """
    with _lock:  # only one thread may use a position
        position = stream_position(generator)
        _refuse_used(what, position)
        _used_positions.add((what, position))
        key = torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator, device=generator.device)
    found = hashlib.shake_256(key.cpu().numpy().tobytes())
    for part in parts:
        found.update(digest([part], 64))
    return _generator_from(found.digest(_ENTROPY_BYTES), device)


def digest(values: Iterable[Tensor | str], size: int = 16) -> bytes:
    """A hash of tensors and texts."""
    found = hashlib.blake2b(digest_size=size)
    for value in values:
        if isinstance(value, str):
            found.update(value.encode())
        else:
            own = value.detach().cpu().contiguous().reshape(-1)
            found.update(own.view(torch.uint8).numpy().data)
    return found.digest()


def _refuse_used(what: str, position: bytes) -> None:
    if (what, position) in _used_positions:
        raise ArgumentError(
            f"{what} was already drawn from a generator in this state, and would be the same"
            " again: leave out generator=, or use another seed.",
            code="noise-repeats",
        )


def can_hide(scale: float) -> bool:
    """False for a clip bound or noise standard deviation at which squares and sums over records
    could overflow or round to 0, which would reveal a record. Clipping, sums and noise are in
    float64, whatever the model's dtype. ``scale`` is public.
    """
    return 1e-30 < scale < 1e150


def check_positive(name: str, value: Any, what: str = "") -> float:
    """``value`` as a positive finite float."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        what = what and f", {what}"
        raise ArgumentError(f"{name} must be a positive finite number{what}; got {value!r}.")
    return float(value)


def check_clip_bound(name: str, value: Any, what: str) -> float:
    """``value`` as a clip bound that noise can hide."""
    if not can_hide(bound := check_positive(name, value, what)):
        raise ArgumentError(
            f"{name} = {value!r} is out of range for sums in float64: use a value between 1e-30"
            " and 1e150; if necessary change the units of parameters or data."
        )
    return bound

"""The front door: model, optimizer and loader in, their private versions out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Never, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader

from .. import words
from ..accounting.accountant import PrivacyAccountant
from ..batches.poisson_loader import PoissonLoader
from ..distributed import Ranks, require_single_process
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, StateError
from ..optim.base import PrivateOptimizer
from ..per_sample.mapped_forward import Loss
from ..posterior import files
from ..posterior.outputs import require_same_buffers
from .attach import made_private, planned
from .plan import Plan
from .settings import Examples, ModuleT, OptimizerFactory, Options, Settings, settings_of

_MODULE, _OPTIMIZER = "module_state_dict", "optimizer_state_dict"  # Opacus' names
_WRITER = "PrivacyEngine.save_checkpoint"


class PrivacyEngine:
    """Makes a model, an optimizer and a data loader private, and holds the accountant they share.

    Args:
        accountant: where everything is charged. None: one is made by the first ``make_private``;
            ``make_private_with_epsilon`` gives it the target as its budget. A built optimizer's own
            accountant is taken as it is: give it a budget, or pass a factory.
        process_group: the ranks that train one model together, as ``torch.distributed.group.WORLD``
            (which is None, one process, where no process group was initialised). Every rank makes
            the same calls with the same data set, all of whose records each of them may read; batch
            sizes are those of all ranks together. Only rank 0 charges a ledger, which all of them
            have open (``path=``); in memory each rank keeps the same history.

    Raises:
        RuntimeError: another rank failed, was lost or differs from this one; the message says in
            what. Errors of one rank are errors on all.

    **Privacy.** The ranks are one data holder's machines: clipped sums without noise travel between
    them, over connections which ``torch.distributed`` does not encrypt. Who sees only what the
    ranks hand out sees the releases of one process.
    """

    def __init__(
        self,
        accountant: PrivacyAccountant | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(accountant, PrivacyAccountant | None):
            raise ArgumentTypeError(
                f"accountant={accountant!r}: leave it out, or pass"
                " torch_dpbayes.PrivacyAccountant(), or"
                ' PrivacyAccountant(method="rdp") for Rényi divergences'
            )
        self._accountant = accountant
        self._is_alone = (
            process_group is not None and torch.distributed.get_world_size(process_group) == 1
        )
        self._ranks = None if process_group is None or self._is_alone else Ranks(process_group)

    @property
    def accountant(self) -> PrivacyAccountant:
        """The accountant that all optimizers of this engine charge."""
        if self._accountant is None:
            raise StateError(
                "the accountant is made by make_private; pass PrivacyEngine(accountant=...) to have"
                " it earlier"
            )
        return self._accountant

    def __repr__(self) -> str:
        found = (
            "nothing is made private yet" if self._accountant is None else repr(self._accountant)
        )
        return f"{type(self).__name__}: {found}"

    def _repr_html_(self) -> str:
        return repr(self) if self._accountant is None else words.html(self, {}, self._accountant)

    def get_epsilon(self, delta: float | None = None) -> float:
        """ε of everything that was charged, at ``delta``; None takes the budget's."""
        return self.accountant.get_epsilon(delta)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module,
        optimizer: PrivateOptimizer,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint; resume it with :meth:`load_checkpoint`.

        The file holds the states of module and optimizer, and with the latter what was charged. No
        record, gradient or batch is in it; generators that were passed as ``generator=`` are, and
        with them the noise to come.

        Args:
            path: where to write; the file is written beside it and moved there.
            module, optimizer: as ``make_private`` returned them.
            checkpoint_dict: more to keep: tensors, numbers, strings, in dicts and lists.

        Raises:
            ValueError: a buffer or a frozen parameter changed since the first private batch, or a
                key of ``checkpoint_dict`` is used.

        **Privacy.** Post-processing of what was released, unless a generator is in it.
        """
        require_same_buffers(getattr(module, "_orig_mod", module), None)
        state = {**(checkpoint_dict or {})}
        for name, of in ((_MODULE, module), (_OPTIMIZER, optimizer)):
            if name in state:
                raise ArgumentError(
                    f"checkpoint_dict has the key {name!r}, which is used: rename it"
                )
            state[name] = of.state_dict()
        files.save(state, path)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module,
        optimizer: PrivateOptimizer,
    ) -> dict[str, Any]:
        """Go on from what :meth:`save_checkpoint` wrote, in a module and optimizer that were made
        private as those were; returns ``checkpoint_dict``. No code in the file is run.

        An empty accountant takes over what the saved run was charged, any other must hold it.

        Raises:
            ValueError: the file holds something else or another network, or the accountant does
                not hold what the saved run was charged; nothing is changed then.
        """
        if not isinstance(optimizer, PrivateOptimizer):
            raise ArgumentTypeError(
                f"the optimizer is a {type(optimizer).__name__}: make the run private first, and"
                " pass the module and optimizer that make_private returned",
                code="optimizer-not-private",
            )
        state = files.load(path, _WRITER)
        if not {_MODULE, _OPTIMIZER} <= state.keys():
            raise CheckpointError(f"{os.fspath(path)} was not written by {_WRITER}")
        of_module = state.pop(_MODULE)
        _require_same_tensors(of_module, module)  # before charges are taken over
        optimizer.load_state_dict(state.pop(_OPTIMIZER))
        module.load_state_dict(of_module)
        return state

    def make_private(
        self,
        *,
        module: ModuleT,
        optimizer: OptimizerFactory | PrivateOptimizer,
        data_loader: DataLoader[Any],
        max_grad_norm: float | None = None,
        noise_multiplier: float | None = None,
        sampling: str = "poisson",
        max_batch_size: int | None = None,
        user_ids: Iterable[Any] | None = None,
        records_per_user: int = 1,
        grad_sample_mode: str | None = None,
        loss_reduction: str = "mean",
        loss: Loss | None = None,
        assume_independent_records: bool = False,
        example_inputs: Examples | None = None,
        **others: Never,
    ) -> tuple[ModuleT, PrivateOptimizer, PoissonLoader]:
        """Attach per-record gradients to the model, Poisson sampling to the loader, and both to the
        optimizer.

        While gradients are recorded the model runs for each record alone, and so does every
        operation between its output and ``backward()``; no record's gradient can depend on another
        record. The loader is replaced by one that draws every record independently at rate q =
        batch size / number of records. Until ``backward()`` its batches, and the model's outputs,
        show the expected batch size and no values. From the first batch on the model's buffers and
        frozen parameters must stay as they are.

        Args:
            module: the model, in training mode. The same object is returned, with hooks attached.
            optimizer: what makes the optimizer, as ``partial(dpb.optim.DPSGLD, lr=0.25)``; called
                with the named trainable parameters and ``num_data=, expected_batch_size=,
                max_grad_norm=, noise_multiplier=, sampling="poisson", accountant=``. Or a built
                optimizer, whose values hold.
            data_loader: a loader over a map-style data set with a fixed batch size; its order of
                records is not used. A ``collate_fn`` of your own is called for each record alone.
            max_grad_norm: clip norm C of one record's gradient. None: the largest at which the
                noise that is asked for is the sampler's own, at the optimizer's lr and temperature;
                :meth:`plan` shows it. It follows from public numbers and changes no charge.
            noise_multiplier: floor of the noise std on the clipped sum, in units of C. Where the
                sampler's own noise is larger, that is what is added and charged, and a warning says
                so.
            sampling: how batches are drawn. ``"poisson"``: every record joins each batch
                independently. ``"random_allocation"``: in every pass over the loader every record
                joins one of its batches, drawn for it alone; a pass has as many batches as
                ``data_loader``, and the noise must not fall within one. ``"fixed_size"``: batches
                of exactly the batch size, drawn anew for each step without replacement; charged at
                sensitivity 2C.
            max_batch_size: cut Poisson batches of more records than this to so many at random, for
                a fixed amount of memory; at least the batch size.
            user_ids: the id of each record's user, a whole number or a string, in the order of the
                data set: ε is then of a user with all of their records. Each user joins a batch
                independently; the accountant has ``unit="user"``.
            records_per_user: with ``user_ids``, the most records of a user that join a batch, drawn
                anew each time. Noise hides so many clip norms: 1 costs least.
            grad_sample_mode: all give the same sum. ``"bookkeeping"``, the default, gets it from
                one ordinary backward pass of the model mapped over records. ``"vmap"`` runs
                everything for one record at a time by ``torch.func``, which takes more time, knows
                no layers, and holds few per-sample gradients. ``"hooks"`` are Opacus' per-sample
                gradients of whole batches, only with ``assume_independent_records``.
            loss_reduction: ``"mean"`` or ``"sum"``: what the loss does over the batch. A mean loss
                must divide by the number of records in the batch, as torch's criteria do.
            loss: ``(output, *targets) -> scalar`` of one record: train with
                ``net.private_loss(x, y).backward()``. None: the loop computes the loss from the
                model's outputs, ``F.cross_entropy(net(x), y).backward()``. Both run for each record
                alone.
            assume_independent_records: you vouch that no record's loss depends on other records,
                in the model and in the loop; the accountant's summary says so. A model that cannot
                be run for one record alone is then run on whole batches.
            example_inputs: arguments of the model for two synthetic records, a tuple of positional
                ones or a mapping of those given by name, where a batch does not show what the model
                takes. Only their shapes and types are used.

        Raises:
            ValueError, TypeError: what is wrong with the model, the loader or the arguments, and
                what to write instead.

        **Privacy.** Nothing is released. Of the data, the number of records is used, which is a
        public constant, and shapes and types of the first record. Every later ``optimizer.step()``
        charges ``PoissonSampledDpEvent(q, GaussianDpEvent(z))``, with ``max_batch_size``
        ``TruncatedSubsampledGaussianDpEvent(N, q, max_batch_size, z)``, of batches of fixed size
        ``SampledWithoutReplacementDpEvent(N, B, GaussianDpEvent(z))``. Random allocation charges
        ``RandomAllocationDpEvent(len(loader), GaussianDpEvent(z))`` at the first step of each pass.
        With ``user_ids`` the number of users and that of records, those beyond
        ``records_per_user`` = k of a user not counted, are the public constants, under replace-one
        too, where another user may bring more records. A step charges
        ``UserLevelDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(z / k)))``; the proof is at
        :class:`~torch_dpbayes.batches.sampling_schemes.UserSampler`.
        """
        given = dict(locals())  # before another name is bound
        del given["self"]
        with self._ranks or self._alone():
            return self._made_private(settings_of(given | given.pop("others")))

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float | None = None,
        target_delta: float,
        epochs: int,
        additional_epsilon: float | None = None,
        calibrate: float | None = None,
        **options: Unpack[Options[ModuleT]],
    ) -> tuple[ModuleT, PrivateOptimizer, PoissonLoader]:
        """:meth:`make_private` with the noise floor that meets (``target_epsilon``,
        ``target_delta``) after ``epochs`` passes.

        Earlier charges of the accountant count. The target fixes the noise; give two of lr,
        temperature and clip norm, and the third follows. Without ``max_grad_norm`` the clip norm
        follows, at the optimizer's temperature (default 1). With ``max_grad_norm`` alone the
        temperature follows. With both, lr may be ``"free"``: the largest lr at which the sampler
        itself needs this noise. If all three are given, the larger noise is used; a warning says
        how much of the target stays unspent, and which values would spend it.

        Args:
            target_epsilon, target_delta: of everything on the accountant after the last epoch.
            epochs: passes over the loader.
            additional_epsilon: instead of ``target_epsilon``: this run's share, on top of the ε of
                earlier charges at ``target_delta``.
            calibrate: a share of the target, such as 0.02, to keep for
                :meth:`.PosteriorSamples.calibrate`, which charges it. If one Gaussian release with
                noise z would spend the whole target, it is this share of 1/z².
            options: all arguments of :meth:`make_private` but ``noise_multiplier``.

        Raises:
            ValueError: nothing is left of the target, the target exceeds the accountant's budget,
                or a built optimizer's floor is too low.
        """
        with self._ranks or self._alone():
            if target_epsilon is None and additional_epsilon is None:
                message = "target_epsilon is needed, or additional_epsilon on top of before"
                raise ArgumentTypeError(message)
            settings = settings_of(
                options,
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                epochs=epochs,
                additional_epsilon=additional_epsilon,
                calibrate=calibrate,
            )
            return self._made_private(settings)

    def plan(
        self,
        *,
        epochs: int,
        target_delta: float | None = None,
        target_epsilon: float | None = None,
        additional_epsilon: float | None = None,
        calibrate: float | None = None,
        **options: Unpack[Options[Any]],
    ) -> Plan:
        """Predict what :meth:`make_private` (or, with ``target_epsilon``,
        :meth:`make_private_with_epsilon`) will do; ``print`` shows it. Nothing is spent or changed.
        Arguments are those of these two; ``target_delta=None`` takes the accountant's δ. The plan
        assumes that lr does not change.
        """
        settings = settings_of(
            options,
            epochs=epochs,
            target_delta=target_delta,
            target_epsilon=target_epsilon,
            additional_epsilon=additional_epsilon,
            calibrate=calibrate,
        )
        return planned(settings, self._accountant, self._ranks)

    def _made_private(
        self, settings: Settings[ModuleT]
    ) -> tuple[ModuleT, PrivateOptimizer, PoissonLoader]:
        optimizer, loader = made_private(
            settings, self._accountant, self._ranks, is_alone=self._is_alone
        )
        self._accountant = optimizer.accountant
        return settings.module, optimizer, loader

    def _alone(self) -> AbstractContextManager[None]:
        if not self._is_alone:
            require_single_process()
        return nullcontext()


def _require_same_tensors(saved: Mapping[str, Any], module: nn.Module) -> None:
    """Raises unless what was saved has the names and shapes of the module's tensors."""
    own = module.state_dict()
    for name in [*saved, *own]:
        sides = [
            "missing" if name not in state else list(getattr(state[name], "shape", ()))
            for state in (saved, own)
        ]
        if sides[0] != sides[1]:
            raise CheckpointError(
                f"the checkpoint is of another network: {name!r} is {sides[0]} in the file and"
                f" {sides[1]} in the module. Load it into the network that was saved; nothing was"
                " changed."
            )

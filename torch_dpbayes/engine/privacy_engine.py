"""The main entry point: makes a model, an optimizer and a loader private."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
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
from ..posterior.outputs import difference_of, require_same_buffers
from .attach import made_private
from .plan import Plan, Run
from .settings import Examples, ModuleT, OptimizerFactory, Options, settings_of

_MODULE, _OPTIMIZER = "module_state_dict", "optimizer_state_dict"  # Opacus' names
_WRITER = "PrivacyEngine.save_checkpoint"


class PrivacyEngine:
    """Makes a model, an optimizer and a data loader private, and holds their accountant.

    Args:
        accountant: the accountant that all steps are charged to. None: the first ``make_private``
            makes one; ``make_private_with_epsilon`` gives it the target as budget. If you pass a
            built optimizer, the optimizer's accountant is used: give that one the budget.
        process_group: the ranks that train one model together, such as
            ``torch.distributed.group.WORLD``; None: one process. Every rank makes the same calls
            with the same whole data set; batch sizes are for all ranks together. A ledger
            (``path=``) is open on all ranks, and only rank 0 charges it. Accountants in memory keep
            the same history on each rank.

    Raises:
        RuntimeError: another rank failed, was lost or has other settings; the message says which.
            If one rank raises, all do.

    **Privacy.** All ranks belong to one data holder: they exchange clipped sums without noise, and
    ``torch.distributed`` does not encrypt them. Outside the ranks only the releases of one process
    are seen.
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
                "nothing is charged yet: make_private makes the accountant; pass"
                " PrivacyEngine(accountant=...) if you need it earlier"
            )
        return self._accountant

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self._accountant or 'nothing is made private yet'}"

    def _repr_html_(self) -> str:
        return repr(self) if self._accountant is None else words.html(self, {}, self._accountant)

    def get_epsilon(self, delta: float | None = None) -> float:
        """ε of all charges, at ``delta`` (None: that of the budget)."""
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

        The file holds the states of module and optimizer, including the charges. It contains no
        record, gradient or batch. It contains generators that you passed as ``generator=``, and so
        the future noise.

        Args:
            path: the file to write. A temporary file is written and then renamed.
            module, optimizer: as ``make_private`` returned them.
            checkpoint_dict: more values to save: tensors, numbers, strings, in dicts and lists.

        Raises:
            ValueError: a buffer or a frozen parameter changed since the first private batch, or a
                key of ``checkpoint_dict`` is reserved.

        **Privacy.** Post-processing of releases, unless the file contains a generator.
        """
        require_same_buffers(getattr(module, "_orig_mod", module), None)
        state = {**(checkpoint_dict or {})}
        for name, of in ((_MODULE, module), (_OPTIMIZER, optimizer)):
            if name in state:
                raise ArgumentError(
                    f"checkpoint_dict has the key {name!r}, which is reserved: rename it"
                )
            state[name] = of.state_dict()
        files.save(state, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, module: nn.Module, optimizer: PrivateOptimizer
    ) -> dict[str, Any]:
        """Resume from a file of :meth:`save_checkpoint`, in a module and optimizer that were made
        private in the same way. Returns ``checkpoint_dict``. No code in the file is run.

        An empty accountant copies the charges of the saved run, any other must contain them.

        Raises:
            ValueError: the file is not a checkpoint, it is from another network, or the accountant
                does not contain the charges of the saved run. Nothing is changed.
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
        _require_alike(of_module, module.state_dict())  # before charges are copied
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

        While gradients are recorded, the model and all operations between its output and
        ``backward()`` run for each record alone: no record's gradient can depend on another record.
        The loader is replaced by one that draws every record independently at rate q = batch size /
        number of records. Until ``backward()`` its batches and the model's outputs have the
        expected batch size as length, and you cannot read their values. After the first batch, the
        model's buffers and frozen parameters must not change.

        Args:
            module: the model, in training mode. The same object is returned, with hooks attached.
            optimizer: a factory such as ``partial(dpb.optim.DPSGLD, lr=0.25)``; it is called with
                the named trainable parameters and ``num_data=, expected_batch_size=,
                max_grad_norm=, noise_multiplier=, sampling="poisson", accountant=``. Or a built
                optimizer, which keeps its values.
            data_loader: a loader of a map-style data set with a fixed batch size. Its order is not
                used. A ``collate_fn`` of your own is called for each record alone.
            max_grad_norm: clip norm C of one record's gradient. None: the C at which the
                sampler's own noise is ``noise_multiplier``, at the optimizer's lr and temperature;
                :meth:`plan` shows it. It is computed from public numbers and changes no charge.
            noise_multiplier: the least noise std on the clipped sum, in units of C. If the
                sampler's own noise is larger, that noise is added and charged, and a warning says
                so.
            sampling: the sampling scheme. ``"poisson"``: every record joins each batch
                independently. ``"random_allocation"``: in every pass over the loader every record
                joins one batch, drawn independently; a pass has as many batches as ``data_loader``,
                and the noise must not decrease within a pass. ``"fixed_size"``: batches of exactly
                the batch size, drawn anew for each step without replacement; charged at sensitivity
                2C.
            max_batch_size: larger Poisson batches are truncated to a random subset of this size,
                which bounds the memory; at least the batch size.
            user_ids: the id of each record's user, an integer or a string, in the order of the data
                set: ε then protects a user with all their records. Each user joins a batch
                independently; the accountant has ``unit="user"``.
            records_per_user: with ``user_ids``, at most this many records of a user join a batch,
                drawn anew each time. The noise must hide this many clip norms: 1 costs least.
            grad_sample_mode: all modes give the same sum. ``"bookkeeping"``, the default, computes
                it by one ordinary backward pass of the model mapped over records. ``"vmap"`` runs
                everything for one record at a time by ``torch.func``: it is slower, uses no kernels
                of layers, and keeps the gradient of each record in memory. ``"hooks"`` are Opacus'
                per-sample gradients of whole batches, only with ``assume_independent_records``.
            loss_reduction: ``"mean"`` or ``"sum"``: the reduction of the loss over the batch. A
                mean loss must divide by the number of records in the batch, as torch's criteria do.
            loss: ``(output, target) -> scalar`` of one record: train with ``net.private_loss(x,
                y).backward()``. None: your loop computes the loss from the model's outputs,
                ``F.cross_entropy(net(x), y).backward()``. Both run for each record alone.
            assume_independent_records: you vouch that no record's loss depends on other records, in
                the model and in the loop; the accountant's summary says so. A model that cannot run
                for one record alone then runs on whole batches.
            example_inputs: arguments of the model for two synthetic records, a tuple (by position)
                or a mapping (by name), if batches do not show the model's arguments. Only their
                shapes and types are used.

        Raises:
            ValueError, TypeError: the model, the loader or an argument does not fit; the message
                says what to write instead.

        **Privacy.** Nothing is released. It uses only the number of records, a public constant, and
        the shapes and types of the first record. Every later ``optimizer.step()`` charges
        ``PoissonSampledDpEvent(q, GaussianDpEvent(z))``, with ``max_batch_size``
        ``TruncatedSubsampledGaussianDpEvent(N, q, max_batch_size, z)``, for batches of fixed size
        ``SampledWithoutReplacementDpEvent(N, B, GaussianDpEvent(z))``. Random allocation charges
        ``RandomAllocationDpEvent(len(loader), GaussianDpEvent(z))`` at the first step of each pass.
        With ``user_ids`` the public constants are the number of users and the number of records,
        counting at most ``records_per_user`` = k records of each user. Both are public
        under replace-one, too, although the user who replaces another may have more records. A step
        charges ``UserLevelDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(z / k)))``; the proof is
        at :class:`~torch_dpbayes.batches.sampling_schemes.UserSampler`.
        """
        given = dict(locals())  # before another name is bound
        del given["self"]
        return self._made_private(given | given.pop("others"))

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

        Earlier charges of the accountant count. The target sets the noise; you choose two of lr,
        temperature and clip norm. Without ``max_grad_norm`` the clip norm is derived, at the
        optimizer's temperature (default 1). With ``max_grad_norm`` alone the temperature is
        derived. With both, lr may be ``"free"``: the largest lr at which the sampler itself needs
        this noise. If all three are given, the larger noise is used; a warning says how much of the
        target stays unspent, and which values would spend it.

        Args:
            target_epsilon, target_delta: (ε, δ) of all charges of the accountant after the last
                epoch.
            epochs: passes over the loader.
            additional_epsilon: instead of ``target_epsilon``: this run's share. It is added to the
                ε of earlier charges at ``target_delta``.
            calibrate: a share of the target, such as 0.02, to reserve for
                :meth:`.PosteriorSamples.calibrate`, which charges it. It is a share of 1/z², where
                z is the noise of one Gaussian release that would spend the whole target.
            options: all arguments of :meth:`make_private` except ``noise_multiplier``.

        Raises:
            ValueError: earlier charges have spent the whole target, the target exceeds the
                accountant's budget, or a built optimizer's ``noise_multiplier`` is too small.
        """
        return self._made_private(
            options,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            epochs=epochs,
            additional_epsilon=additional_epsilon,
            calibrate=calibrate,
        )

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
        It takes the arguments of these two methods; ``target_delta=None`` is the accountant's δ.
        The plan assumes that lr does not change.
        """
        settings = settings_of(
            options,
            epochs=epochs,
            target_delta=target_delta,
            target_epsilon=target_epsilon,
            additional_epsilon=additional_epsilon,
            calibrate=calibrate,
        )
        run = Run(settings, self._accountant, self._ranks)
        return run.plan(run.optimizer()[0])

    def _made_private(self, options: Mapping[str, Any], **target: Any) -> Any:
        if self._ranks is None and not self._is_alone:
            require_single_process()
        with self._ranks or nullcontext():
            if target and target["target_epsilon"] is target["additional_epsilon"] is None:
                raise ArgumentTypeError("target_epsilon is needed, or additional_epsilon")
            settings = settings_of(options, **target)
            optimizer, loader = made_private(
                settings, self._accountant, self._ranks, is_alone=self._is_alone
            )
            self._accountant = optimizer.accountant
            return settings.module, optimizer, loader


def _require_alike(*states: Mapping[str, Any]) -> None:
    saved, own = (
        {name: getattr(value, "shape", torch.Size()) for name, value in state.items()}
        for state in states
    )
    if saved != own:
        raise CheckpointError(
            f"the checkpoint is from another network: {difference_of(saved, own)}. Load it into the"
            " network that was saved; nothing was changed."
        )

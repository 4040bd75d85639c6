"""The front door: model, optimizer and loader in, their private versions out."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.data import DataLoader

from .. import words
from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import check_epsilon
from ..batches.poisson_loader import PoissonLoader
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, StateError
from ..optim.base import PrivateOptimizer
from ..per_sample.fixed_tensors import FixedTensors
from ..per_sample.mapped_forward import Loss
from ..per_sample.nested import Keywords, map_tensors, ways_to_pass
from ..ranks import Ranks, refuse_wrapped, require_alone
from .gradient_sources import Recording, attached_source
from .loaders import Batches, private_loader, require_own_streams
from .optimizers import OptimizerFactory, build, build_calibrated, is_held
from .plan import Plan, little_left, overridden_floor, plan_of
from .same_on_all_ranks import compare

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MODULE, _OPTIMIZER = "module_state_dict", "optimizer_state_dict"  # Opacus' names
_NOT_OURS = "{} was not written by PrivacyEngine.save_checkpoint"

_log = logging.getLogger("torch_dpbayes")

# where a model's steps were charged last
_accountants: WeakKeyDictionary[nn.Module, ref[PrivacyAccountant]] = WeakKeyDictionary()
_CHARGED_ELSEWHERE = (
    "the model was made private on another accountant before: epsilon of records that both"
    " trainings read is that of both together"
)


class PrivacyEngine:
    """Makes a model, an optimizer and a data loader private, and holds the accountant they share.

    Args:
        accountant: where everything is charged. None: one is made by the first ``make_private``;
            ``make_private_with_epsilon`` gives it the target as a budget that cannot be overrun.
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
        if isinstance(accountant, str):
            raise ArgumentTypeError(
                f'accountant={accountant!r}: pass PrivacyAccountant(method="rdp") for Rényi'
                " divergences, or leave it out for privacy loss distributions, which are tighter"
            )
        if not isinstance(accountant, PrivacyAccountant | None):
            raise ArgumentTypeError(
                f"the accountant is a {type(accountant).__name__}: pass"
                " torch_dpbayes.PrivacyAccountant(), or leave it out"
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
        if self._accountant is None:
            return f"{type(self).__name__}(): nothing is made private yet"
        return words.one_line(self, self._numbers, self._accountant)

    def _repr_html_(self) -> str:
        if self._accountant is None:
            return repr(self)
        return words.html(self, self._numbers, self._accountant)

    @property
    def _numbers(self) -> dict[str, Any]:
        assert self._accountant is not None
        return {
            "neighboring": self._accountant.neighboring,
            "method": self._accountant.method,
            "releases": len(self._accountant),
        }

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
        """Write a run to a file, to be gone on with by :meth:`load_checkpoint`.

        The file holds the states of module and optimizer, and with the latter what was charged. It
        is written beside ``path`` and moved there. No record, gradient or batch is in it;
        generators that were passed as ``generator=`` are, and with them the noise to come.

        Args:
            path: where to write.
            module, optimizer: as ``make_private`` returned them.
            checkpoint_dict: more to keep: tensors, numbers, strings, in dicts and lists.

        **Privacy.** Post-processing of what was released, unless a generator is in it.
        """
        state = {**(checkpoint_dict or {})}
        for name, of in ((_MODULE, module), (_OPTIMIZER, optimizer)):
            if name in state:
                raise ArgumentError(
                    f"checkpoint_dict has the key {name!r}, which is used: rename it"
                )
            state[name] = of.state_dict()
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            torch.save(state, temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module,
        optimizer: PrivateOptimizer,
    ) -> dict[str, Any]:
        """Go on from what :meth:`save_checkpoint` wrote, in a module and optimizer that were made
        private as those were.

        An empty accountant takes over what the saved run was charged, any other must hold it. No
        code in the file is run.

        Returns:
            ``checkpoint_dict``.

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
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # whatever a file of something else makes of torch's reader
            raise CheckpointError(_NOT_OURS.format(os.fspath(path))) from error
        if not isinstance(state, dict) or not {_MODULE, _OPTIMIZER} <= state.keys():
            raise CheckpointError(_NOT_OURS.format(os.fspath(path)))
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
        people: Iterable[Any] | None = None,
        records_per_person: int = 1,
        grad_sample_mode: str | None = None,
        loss_reduction: str = "mean",
        loss: Loss | None = None,
        assume_independent_records: bool = False,
        example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
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
                records is not used.
            max_grad_norm: clip norm C of one record's gradient.
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
            people: the id of each record's person, a whole number or a string, in the order of the
                data set: ε is then of a person with all of their records. Each person joins a batch
                independently; the accountant has ``unit="user"``.
            records_per_person: with ``people``, how many records of somebody join a batch at most,
                drawn anew each time. Noise hides so many clip norms: 1 costs least, and somebody
                with more records counts as so many.
            grad_sample_mode: all give the same sum. ``"bookkeeping"``, the default, gets it from
                one ordinary backward pass of the model mapped over records. ``"vmap"`` runs
                everything for one record at a time by ``torch.func``, which takes more time, knows
                no layers, and holds few per-sample gradients. ``"hooks"`` are Opacus' per-sample
                gradients of whole batches, only with ``assume_independent_records``.
            loss_reduction: ``"mean"`` or ``"sum"``: what the loss does over the batch. A mean loss
                must divide by the number of records in the batch, as torch's criteria do.
            loss: ``(output, *targets) -> scalar`` of one record, run for each record alone: train
                with ``net.private_loss(x, y).backward()``. None: the loop computes the loss from
                the model's outputs, ``F.cross_entropy(net(x), y).backward()``, and each of its
                operations runs for each record alone.
            assume_independent_records: you vouch that no record's loss depends on other records,
                in the model and in the loop; the accountant's summary says so. A model that cannot
                be run for one record alone is then run on whole batches.
            example_inputs: arguments of the model for two synthetic records, a tuple of positional
                ones or a mapping of those given by name, where a batch does not show what the model
                takes. Only their shapes and types are used.

        Returns:
            The model, the optimizer and the private loader.

        Raises:
            ValueError, TypeError: what is wrong with the model, the loader or the arguments, and
                what to write instead.

        **Privacy.** Nothing is released. Of the data, the number of records is used, which is a
        public constant, and shapes and types of the first record. Every later ``optimizer.step()``
        charges ``PoissonSampledDpEvent(q, GaussianDpEvent(z))``, with ``max_batch_size``
        ``TruncatedSubsampledGaussianDpEvent(N, q, max_batch_size, z)``, of batches of fixed size
        ``SampledWithoutReplacementDpEvent(N, B, GaussianDpEvent(z))``. Random allocation charges
        ``RandomAllocationDpEvent(len(loader), GaussianDpEvent(z))`` at the first step of each pass.
        With ``people`` the number of people and that of records, those beyond
        ``records_per_person`` = k of somebody not counted, are the public constants, under
        replace-one too, where another person may bring more records. A step charges
        ``UserLevelDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(z / k)))``; the proof is at
        :class:`~torch_dpbayes.batches.people.PeopleSampler`.
        """
        with self._together():
            refuse_wrapped(module)
            batches = Batches(sampling, max_batch_size, people, records_per_person)
            loader = private_loader(data_loader, self._ranks, batches)
            accountant = self._accountant_for(optimizer, batches, None, None)
            built = build(module, optimizer, loader, accountant, max_grad_norm, noise_multiplier)
            recording = Recording(
                grad_sample_mode, loss_reduction, loss, assume_independent_records, example_inputs
            )
            made = self._attach(module, built, loader, data_loader, recording)
            if noise_multiplier is not None and (self._ranks is None or self._ranks.rank == 0):
                for warning in overridden_floor(built):
                    _log.warning("%s", warning)
            return made

    def make_private_with_epsilon(
        self,
        *,
        module: ModuleT,
        optimizer: OptimizerFactory | PrivateOptimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float | None = None,
        target_delta: float,
        epochs: int,
        additional_epsilon: float | None = None,
        max_grad_norm: float | None = None,
        sampling: str = "poisson",
        max_batch_size: int | None = None,
        people: Iterable[Any] | None = None,
        records_per_person: int = 1,
        grad_sample_mode: str | None = None,
        loss_reduction: str = "mean",
        loss: Loss | None = None,
        assume_independent_records: bool = False,
        example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    ) -> tuple[ModuleT, PrivateOptimizer, PoissonLoader]:
        """:meth:`make_private` with the noise floor that meets (``target_epsilon``,
        ``target_delta``) after ``epochs`` passes.

        What the accountant was charged before counts. lr and temperature are never changed: where
        the sampler's own noise exceeds the floor, less than the target is spent, which a warning
        says (:meth:`plan` shows it beforehand). ``partial(dpb.optim.DPSGLD, lr="free")`` takes the
        largest lr at which floor and sampler's noise meet, which uses all of it.

        Args:
            target_epsilon: ε of everything on the accountant after the last epoch.
            target_delta: its δ.
            epochs: passes over the loader.
            sampling, max_batch_size, people, records_per_person: as in :meth:`make_private`.
            additional_epsilon: in the place of ``target_epsilon``, what this run may add to the ε
                that the accountant holds at ``target_delta`` already.
            module, optimizer, data_loader, max_grad_norm: as in :meth:`make_private`.
            grad_sample_mode, loss_reduction, loss: as there.
            assume_independent_records, example_inputs: as there.

        Raises:
            ValueError: nothing is left of the target, the target exceeds the accountant's budget,
                or a built optimizer's floor is too low.
        """
        with self._together():
            refuse_wrapped(module)
            if target_epsilon is None and additional_epsilon is None:
                raise ArgumentTypeError(
                    "target_epsilon is needed, or additional_epsilon on top of before"
                )
            batches = Batches(sampling, max_batch_size, people, records_per_person)
            accountant, target = self._target(
                optimizer, batches, target_epsilon, additional_epsilon, target_delta
            )
            assert target is not None
            loader = private_loader(data_loader, self._ranks, batches)
            built, floor = build_calibrated(
                module,
                optimizer,
                loader,
                accountant,
                max_grad_norm,
                target,
                target_delta,
                epochs,
                self._ranks,
            )
            if built.noise_multiplier < floor:
                raise ArgumentError(
                    f"the optimizer was built with noise_multiplier = {built.noise_multiplier};"
                    f" epsilon = {target} after {epochs} epochs needs at least {floor:.4f}:"
                    " build it with that, or pass a factory",
                    code="optimizer-settings",
                )
            recording = Recording(
                grad_sample_mode, loss_reduction, loss, assume_independent_records, example_inputs
            )
            made = self._attach(module, built, loader, data_loader, recording)
            if self._ranks is None or self._ranks.rank == 0:
                plan = plan_of(built, loader, accountant, epochs, target_delta, target)
                for warning in [*little_left(accountant, plan), *plan.unused_target]:
                    _log.warning("%s", warning)
            return made

    def plan(
        self,
        *,
        module: nn.Module,
        optimizer: OptimizerFactory | PrivateOptimizer,
        data_loader: DataLoader[Any],
        epochs: int,
        target_delta: float | None = None,
        target_epsilon: float | None = None,
        additional_epsilon: float | None = None,
        max_grad_norm: float | None = None,
        noise_multiplier: float | None = None,
        sampling: str = "poisson",
        max_batch_size: int | None = None,
        people: Iterable[Any] | None = None,
        records_per_person: int = 1,
    ) -> Plan:
        """What :meth:`make_private` (or, with ``target_epsilon``,
        :meth:`make_private_with_epsilon`) will do; printed (by rank 0) and returned.

        Nothing is spent and nothing is changed. lr is taken to stay what it is.

        Args:
            target_delta: δ; None takes the accountant's.
            module, optimizer, data_loader, epochs, target_epsilon: as for those two.
            additional_epsilon, max_grad_norm, noise_multiplier, sampling, max_batch_size: as there.
            people, records_per_person: as there.
        """
        accountant, built, loader, delta, target = self._planned(
            module,
            optimizer,
            data_loader,
            epochs,
            target_delta,
            target_epsilon,
            additional_epsilon,
            max_grad_norm,
            noise_multiplier,
            Batches(sampling, max_batch_size, people, records_per_person),
        )
        result = plan_of(built, loader, accountant, epochs, _delta_of(accountant, delta), target)
        if self._ranks is None or self._ranks.rank == 0:
            print(result)
            result.was_printed()
        return result

    def _planned(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory | PrivateOptimizer,
        data_loader: DataLoader[Any],
        epochs: int,
        target_delta: float | None,
        target_epsilon: float | None,
        additional_epsilon: float | None,
        max_grad_norm: float | None,
        noise_multiplier: float | None,
        batches: Batches,
    ) -> tuple[PrivacyAccountant, PrivateOptimizer, PoissonLoader, float | None, float | None]:
        """The accountant, optimizer and loader of a run that is planned, its δ and target."""
        accountant, target = self._target(
            optimizer, batches, target_epsilon, additional_epsilon, target_delta
        )
        loader = private_loader(data_loader, self._ranks, batches)
        if target is None:
            built = build(module, optimizer, loader, accountant, max_grad_norm, noise_multiplier)
            return accountant, built, loader, target_delta, target
        if noise_multiplier is not None:
            raise ArgumentError("target_epsilon sets the floor: leave out noise_multiplier")
        delta = _delta_of(accountant, target_delta)
        built, _ = build_calibrated(
            module, optimizer, loader, accountant, max_grad_norm, target, delta, epochs, None
        )
        return accountant, built, loader, delta, target

    def _target(
        self,
        optimizer: OptimizerFactory | PrivateOptimizer,
        batches: Batches,
        target_epsilon: float | None,
        additional_epsilon: float | None,
        delta: float | None,
    ) -> tuple[PrivacyAccountant, float | None]:
        """The accountant, and the ε of everything on it at the end."""
        if additional_epsilon is None:
            return self._accountant_for(optimizer, batches, target_epsilon, delta), target_epsilon
        if target_epsilon is not None:
            raise ArgumentError(
                "target_epsilon is of everything on the accountant, additional_epsilon of this run:"
                " pass one of them"
            )
        accountant = self._accountant_for(optimizer, batches, additional_epsilon, delta)
        delta = _delta_of(accountant, delta)
        if is_held(accountant):
            raise ArgumentError(
                "additional_epsilon needs an accountant that adds up its charges; this one's"
                " guarantee is its budget as a whole: pass that as target_epsilon",
                code="budget-whole",
            )
        return accountant, accountant.get_epsilon(delta) + check_epsilon(additional_epsilon)

    def _accountant_for(
        self,
        optimizer: OptimizerFactory | PrivateOptimizer,
        batches: Batches,
        epsilon: float | None,
        delta: float | None,
    ) -> PrivacyAccountant:
        """The engine's accountant, else a built optimizer's, else a new one with the target
        as its budget.
        """
        found = self._accountant
        if found is None and isinstance(optimizer, PrivateOptimizer):
            found = optimizer.accountant
        if found is None:
            delta = delta if epsilon is not None else None
            found = PrivacyAccountant(epsilon, delta, unit=batches.unit)
        batches.require_unit(found)
        return found

    def _together(self) -> AbstractContextManager[None]:
        """What goes wrong inside on one rank is an error on all."""
        if self._ranks is not None:
            return self._ranks.reporting()
        if not self._is_alone:
            require_alone()
        return nullcontext()

    def _attach(
        self,
        module: ModuleT,
        optimizer: PrivateOptimizer,
        loader: PoissonLoader,
        data_loader: DataLoader[Any],
        recording: Recording,
    ) -> tuple[ModuleT, PrivateOptimizer, PoissonLoader]:
        """Check the model, then tie model, optimizer and loader together."""
        require_own_streams(optimizer, loader)
        if recording.assume_independent:
            loader.vouch()
        examples = recording.example_inputs
        if examples is None:
            batch = loader.collate_fn([loader.dataset[0]])
            ways = _to_device_of(module, ways_to_pass(module, batch))
        else:
            ways = [(Keywords(examples),) if isinstance(examples, Mapping) else examples]
        try:
            source = attached_source(module, recording, ways)
        except ValueError as error:
            if examples is not None or not (names := _lists_in(loader.dataset[0])):
                raise
            raise ArgumentError(
                f"the model fails on records in which {names} are lists, of which torch's collate"
                " function makes a tensor for each place: return tensors, as"
                ' dataset.with_format("torch") of Hugging Face does',
                code="loader-collate",
            ) from error
        try:
            if self._ranks is not None:
                compare(self._ranks, module, optimizer, loader, recording.loss_reduction)
        except BaseException:
            source.remove()
            raise
        _log.info("records are kept apart %s", source.independence)
        fixed = FixedTensors(module)
        module.__dict__["_dpbayes_buffers"] = fixed.values  # for PosteriorSamples
        optimizer.release.bind(
            source,
            loader.sampler_of_draws,
            fixed,
            [p for group in optimizer.param_groups for p in group["params"]],
            is_alone=self._is_alone,
        )
        self._accountant = optimizer.accountant
        is_first = self._ranks is None or self._ranks.rank == 0
        if _was_charged_elsewhere(module, optimizer.accountant):
            optimizer.accountant.note(_CHARGED_ELSEWHERE)
            if is_first:
                _log.warning(
                    "%s. Go on with that accountant, PrivacyEngine(accountant), or begin with a"
                    " new model.",
                    _CHARGED_ELSEWHERE,
                )
        _accountants[module] = ref(optimizer.accountant)
        if not isinstance(data_loader, PoissonLoader) and is_first:
            _log.warning(
                "the data loader now draws %s: each of %d %s joins a batch with"
                " probability %.6g, %d batches a pass%s",
                loader.sampler_of_draws.batches,
                *loader.sampler_of_draws.drawn,
                loader.sample_rate,
                len(loader),
                "" if self._ranks is None else f", divided among {self._ranks.size} ranks",
            )
        return module, optimizer, loader


def _delta_of(accountant: PrivacyAccountant, delta: float | None) -> float:
    if (delta := accountant.delta if delta is None else delta) is None:
        raise ArgumentError(
            "target_delta is needed: the accountant has no budget to take it from",
            code="budget-delta",
        )
    return delta


def _was_charged_elsewhere(module: nn.Module, accountant: PrivacyAccountant) -> bool:
    """Whether the model may have been trained on an accountant that this new one does not hold."""
    if module not in _accountants or len(accountant):
        return False
    before = _accountants[module]()
    return before is None or (
        before is not accountant and (before.path is not None or len(before) > 0)
    )


def _lists_in(record: Any) -> str:
    """The names of what is a list of numbers in a record that is a mapping."""
    fields = record.items() if isinstance(record, Mapping) else ()
    return ", ".join(
        repr(name)
        for name, value in fields
        if isinstance(value, list) and value and isinstance(value[0], (int, float))
    )


def _to_device_of(module: nn.Module, inputs: Any) -> Any:
    device = next(module.parameters()).device
    return map_tensors(inputs, lambda t: t.to(device))


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

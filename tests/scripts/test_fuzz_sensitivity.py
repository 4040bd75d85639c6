"""The search for holes: it measures the truth, its labels are right, and it finds what is there."""

import json
import math
import random

import fuzz_sensitivity
import pytest
import random_models
import torch
from fuzz_sensitivity import (
    DrawsByRecord,
    Finding,
    PrivateSteps,
    Search,
    Totals,
    movement_of,
    quiet,
    random_records,
)
from random_models import (
    GRADIENT_MIXERS,
    HIDDEN,
    KINDS,
    LATE,
    LOSSES,
    MIXERS,
    PARTS,
    Recipe,
    Switch,
    build,
    random_recipe,
)
from torch.func import vmap

import torch_dpbayes.engine.gradient_sources


def fresh_seed():
    return int(torch.randint(2**48, ()))


def simple(**more):
    return Recipe(
        **{
            "seed": fresh_seed() % 2**31,
            "family": "rows",
            "body": [],
            "tail": [["linear", {}, []], ["tanh", {}, []]],
            **more,
        }
    )


# -- the generator: its labels are the truth -------------------------------------------------------


def part_of(name, family, options):
    inside = (
        [["convolution" if family == "image" else "linear", {}, []]]
        if PARTS[name].has_inside
        else []
    )
    part = random_models._built([name, options, inside], HIDDEN[family]).double()
    for layer in part.modules():
        if isinstance(layer, Switch):
            layer.flip()
    return part


def all_options(name):
    every = [{}]
    for option, choices in PARTS[name].options.items():
        values = (
            ["none"]
            if option == "guard"
            else [1.0]
            if option == "strength"
            else sorted(set(choices), key=str)
        )
        every = [{**options, option: value} for options in every for value in values]
    return every


def rows_of(part, h, key, names, weight, seed):
    """Outputs and gradients with respect to the inputs, of the records called ``names``."""
    given = h[names].clone().requires_grad_()
    with DrawsByRecord(names, seed):
        out = part(given, key[names])
        (gradient,) = torch.autograd.grad((out * weight[names]).sum(), given)
    return out.detach(), gradient


def mapped_gradients(part, h, key, weight):
    def of_one(x, k, w):
        return torch.func.grad(lambda x: (part(x[None], k[None])[0] * w).sum())(x)

    return vmap(of_one)(h, key, weight)


def largest_influence(name, family, options, tries):
    """How far others' outputs, gradients or inputs to a layer move when the first record leaves."""
    largest = 0.0
    for _ in range(tries):
        if largest > 1e-6:
            break
        seed = fresh_seed()
        part = part_of(name, family, options)
        n = 6
        h = torch.randn(n, *HIDDEN[family], dtype=torch.float64)
        h[0] *= 100
        weight = 50 * torch.randn(n, *HIDDEN[family], dtype=torch.float64)
        key = torch.randint(3, (n, 3))
        key[0] = torch.randint(6, (3,))
        seen = []
        inside = getattr(part, "inside", None)
        if inside is not None:
            inside.register_forward_pre_hook(
                lambda module, given, seen=seen: seen.append(given[0].detach())
            )
        rest = list(range(1, n))
        if options.get("how") == "mapping rule":
            whole = [mapped_gradients(part, h, key, weight)[1:]]
            less = [mapped_gradients(part, h[1:], key[1:], weight[1:])]
        else:
            whole = [t[1:] for t in rows_of(part, h, key, list(range(n)), weight, seed)]
            if "kept" in vars(part):  # a state is seen by the batch after it
                whole, part = (
                    list(rows_of(part, h, key, rest, weight, seed)),
                    part_of(name, family, options),
                )
            less = list(rows_of(part, h, key, rest, weight, seed))
            if PARTS[name].has_inside and name != "around" and len(seen) >= 2:
                whole, less = [*whole, seen[0][1:]], [*less, seen[1]]
        largest = max(
            [
                largest,
                *(float((a - b).detach().abs().max()) for a, b in zip(whole, less, strict=True)),
            ]
        )
    return largest


@pytest.mark.first_cases(44)
@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.kind == "free"])
def test_what_is_called_free_keeps_records_apart_in_both_passes(name):
    for family in PARTS[name].families:
        for options in all_options(name):
            assert largest_influence(name, family, options, tries=2) < 1e-9


@pytest.mark.first_cases(24)
@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.kind != "free"])
def test_what_is_not_called_free_lets_a_record_be_seen(name):
    for options in all_options(name):
        if options.get("gradient") in ("clipped by value", "small ones cut"):
            continue  # in means only, and this differentiates a sum
        # one try in six shows it where the first record has to have the largest gradient
        assert largest_influence(name, "rows", options, tries=200) > 1e-6, options


def test_only_losses_that_are_called_free_have_a_gradient_that_is_each_records_own():
    for name, loss in LOSSES.items():
        moved = 0.0
        for attempt in range(20):
            n = 6
            out = torch.randn(n, 3, dtype=torch.float64)
            y = torch.randint(3, (n,)).double()
            y[0] = (0.0, -100.0)[attempt % 2]

            def gradients(rows, out=out, y=y, loss=loss):
                given = out[rows].clone().requires_grad_()
                (g,) = torch.autograd.grad(loss.function(given, y[rows]), given)
                return g * (len(g) if loss.reduction == "mean" else 1)

            moved = max(
                moved,
                float((gradients(list(range(n)))[1:] - gradients(list(range(1, n)))).abs().max()),
            )
        assert (moved < 1e-9) == (loss.kind == "free"), (name, moved)


def test_a_seed_is_a_recipe_and_a_recipe_is_a_model_also_after_it_was_written_down():
    for _ in range(50):
        seed = fresh_seed()
        recipe = random_recipe(seed, ["free", *KINDS])
        assert recipe == random_recipe(seed, ["free", *KINDS])
        again = Recipe(**json.loads(json.dumps(recipe.as_dict())))
        assert again == recipe and again.kinds == recipe.kinds
        for p, q in zip(build(recipe).parameters(), build(again).parameters(), strict=True):
            assert torch.equal(p, q)


def test_every_kind_is_built_and_says_so():
    mixing = (
        {part.kind for part in PARTS.values()}
        | {loss.kind for loss in LOSSES.values()}
        | {late.kind for late in LATE.values()}
    )
    assert mixing == {"free", *KINDS}
    for kind in KINDS:
        for _ in range(20):
            assert kind in random_recipe(fresh_seed(), [kind]).kinds
    for _ in range(50):
        assert random_recipe(fresh_seed(), ["free"]).kinds == []
    assert {kind for kind, _ in MIXERS.values()} <= set(KINDS) and GRADIENT_MIXERS


# -- the measurement -------------------------------------------------------------------------------


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_what_is_measured_is_the_sum_of_clipped_gradients(mode):
    recipe = simple(clip=0.3, has_category=True)
    n = 7
    records = random_records(recipe, random.Random(fresh_seed()), n)
    records[0] = torch.randn(n, 5)
    model = build(recipe)
    clipped = []
    for k in range(n):
        *inputs, y = (t[k : k + 1] for t in records)
        gradients = torch.autograd.grad(
            LOSSES[recipe.loss].function(model(*inputs), y), list(model.parameters())
        )
        flat = torch.cat([g.flatten() for g in gradients]).double()
        clipped.append(flat / flat.norm() * min(1.0, float(flat.norm()) / recipe.clip))
    with quiet():
        steps = PrivateSteps(recipe, mode)
        for rows in (list(range(n)), [3], [], [6, 0, 2]):  # any batch, and again after an empty one
            true = sum(
                (clipped[k] for k in rows), torch.zeros(len(clipped[0]), dtype=torch.float64)
            )
            assert float((steps.sum_of([t[rows] for t in records], rows) - true).norm()) < 1e-4
    assert movement_of(recipe, mode, records, 4) == pytest.approx(
        float(clipped[4].norm()), abs=1e-4
    )


def test_a_step_that_fails_leaves_the_next_measurement_as_it_was(monkeypatch):
    recipe = simple()
    records = random_records(recipe, random.Random(fresh_seed()), 4)
    with quiet():
        steps = PrivateSteps(recipe, "bookkeeping")
        before = steps.sum_of(records, range(4))
        with monkeypatch.context() as patch:
            patch.setattr(steps._optimizer.release, "take", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                steps.sum_of([t[:2] for t in records], range(2))
        assert torch.equal(steps.sum_of(records, range(4)), before)


def test_a_record_keeps_its_random_numbers_when_others_leave():
    def draws(names):
        with DrawsByRecord(names):
            dropped = torch.nn.functional.dropout(torch.ones(len(names), 4), 0.5)
            return torch.cat(
                [dropped, torch.randn(len(names), 3), torch.empty(len(names), 1).bernoulli_(0.5)], 1
            ), torch.rand(3)

    (some, shared), (all_of, again) = draws([5, 2]), draws([0, 2, 7, 5, 1])
    assert torch.equal(some, all_of[[3, 1]]) and torch.equal(shared, again)
    assert not torch.equal(all_of[0], all_of[1])


# -- the search ------------------------------------------------------------------------------------


@pytest.fixture
def unchecked(monkeypatch):
    """A library that takes every model that it can record."""
    monkeypatch.setattr(torch_dpbayes.engine.gradient_sources, "check_model", lambda *_, **__: None)


@pytest.mark.thorough
def test_it_finds_the_hole_in_a_library_that_checks_nothing(unchecked, tmp_path):
    path = tmp_path / "findings.jsonl"
    search = Search(["bookkeeping"], ["statistics"], path=path)
    for _ in range(40):  # models, most of which can be found out
        if not search.findings:
            search.run(pairs=1, is_shown=False)
    assert search.findings, f"seed {search.seed}"
    finding = search.findings[0]
    assert finding.movement > 1.01 and "statistics" in finding.kinds
    assert movement_of(
        finding.recipe, finding.mode, finding.records, finding.added, finding.names
    ) == pytest.approx(finding.movement, rel=1e-3)
    entry = next(
        entry
        for line in path.read_text().splitlines()
        if (entry := json.loads(line))["type"] == "finding"
    )
    again = movement_of(
        entry["recipe"], entry["mode"], entry["records"], entry["added"], entry["names"]
    )
    assert again == pytest.approx(entry["movement"], rel=1e-3)
    assert "statistics" in search.summary()


def test_a_finding_is_printed_as_a_program_that_shows_it(unchecked, capsys):
    recipe = simple(
        family="sequence",
        body=[["centred", {"guard": "none", "strength": 1.0, "form": "where"}, []]],
        has_category=True,
        gain=4.0,
    )
    records = random_records(recipe, random.Random(fresh_seed()), 6)
    records[0][2] = torch.tensor(math.inf)  # has to be written down
    exec(Finding(recipe, "hooks", records, range(6), 2, 3.0).as_program(), {})
    assert float(capsys.readouterr().out) == movement_of(recipe, "hooks", records, 2)


@pytest.mark.thorough
def test_a_search_goes_on_where_it_was_and_survives_a_line_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_sensitivity, "CANDIDATES", 2)
    path = tmp_path / "findings.jsonl"
    first = Search(["bookkeeping"], ["free"], path=path)
    first.run(pairs=1, is_shown=False)
    with path.open("a") as file:
        file.write('{"type": "find')
    second = Search(["bookkeeping"], ["free"], path=path)
    assert second.totals == first.totals
    assert second.totals["bookkeeping"].free_pairs == second.totals["bookkeeping"].pairs > 0


def test_totals_of_sessions_add_up():
    one, other = Totals(pairs=3, largest=2.0), Totals(pairs=4, largest=1.0)
    one.reasons["a"], other.reasons["a"] = 1, 2
    one.add(vars(other))
    assert (one.pairs, one.largest, one.reasons["a"]) == (7, 2.0, 3)


def test_a_mode_that_this_version_does_not_know_is_left_out():
    assert Search(["bookkeeping", "telepathy"], ["free"]).modes == ["bookkeeping"]


def test_a_refused_model_is_asked_for_again_as_the_message_says():
    """With example records that differ, and without a loss, which hooks do not take."""
    recipe, totals = simple(examples="zeros", is_loss_given=True), Totals()
    with quiet():
        found = fuzz_sensitivity.search_model(
            recipe, "hooks", random.Random(fresh_seed()), totals, rounds=1
        )
    assert found is None and totals.refused == 0 and totals.pairs > 0
    assert totals.pairs_with_loss_given == 0


@pytest.mark.slow
def test_a_few_minutes_of_search_find_nothing():
    search = Search(fuzz_sensitivity.MODES, ["free", *KINDS])
    found = search.run(seconds=200, is_shown=False)
    programs = "\n".join(finding.as_program() for finding in found)
    assert not found, f"seed {search.seed}\n{search.summary()}\n{programs}"
    for mode, totals in search.totals.items():
        assert totals.free_refused <= totals.free_models / 2, f"{mode}\n{search.summary()}"

"""Records in tar files: each is read as it was written, and an index that is wrong is found."""

import io
import json
import os
import random
import tarfile
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import torch_dpbayes as dpb
from torch_dpbayes.batches.poisson_loader import PoissonLoader

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "PAX": tarfile.PAX_FORMAT}


def write(path, records, form=tarfile.GNU_FORMAT):
    """A shard of ``{name: {extension: bytes}}``; a name of one dot only is no record's."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, files in records.items():
            for extension, data in files.items():
                member = tarfile.TarInfo(f"{name}.{extension}" if extension else name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_index(folder, counts, **more):
    shards = [{"url": name, "nsamples": count, **more} for name, count in counts.items()]
    (folder / "index.json").write_text(json.dumps({"shardlist": shards}))
    return folder / "index.json"


def tensors(files):
    return torch.frombuffer(bytearray(files["x"]), dtype=torch.float32), int(files["y"])


def shards_of(folder, x, y, lengths):
    """The rows of ``x`` and ``y`` in shards of these lengths."""
    rows, counts = iter(range(len(x))), {}
    for number, length in enumerate(lengths):
        some = [next(rows) for _ in range(length)]
        records = {f"{i}": {"x": x[i].numpy().tobytes(), "y": b"%d" % y[i]} for i in some}
        write(folder / f"{number}.tar", records)
        counts[f"{number}.tar"] = length
    return write_index(folder, counts)


@pytest.fixture
def data(tmp_path):
    x, y = torch.randn(60, 3), torch.arange(60) % 2
    return x, y, shards_of(tmp_path, x, y, [20, 0, 1, 39])


@pytest.mark.parametrize("form", FORMATS)
def test_names_and_files_as_people_have_them(tmp_path, form):
    """Folders, long names, extensions of several parts, empty files, and files of no record."""
    long = "/".join(["a folder with a long name"] * 3) + "/" + 60 * "n"
    records = {
        "README": {"": b"no record"},
        "a/1": {"jpg": b"one", "seg.png": 700 * b"more than a block", "cls": b""},
        "b/1": {"jpg": b"another folder, another record"},
        long: {"jpg": b"long", "cls": b"3"},
        "é 2": {"jpg": b"two"},
        ".hidden": {"": b"no record"},
    }
    write(tmp_path / "s.tar", records, FORMATS[form])
    with tarfile.open(tmp_path / "s.tar", "a", format=FORMATS[form]) as tar:
        folder = tarfile.TarInfo("c.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    dataset = dpb.TarShards(write_index(tmp_path, {"s.tar": 4}), decode=dict)
    assert [dataset[i] for i in range(len(dataset))] == [
        records[name] for name in ("a/1", "b/1", long, "é 2")
    ]


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), data=st.data())
def test_any_positions_in_any_order(tmp_path_factory, lengths, data):
    folder, total = tmp_path_factory.mktemp("shards"), sum(lengths)
    values = torch.arange(3.0 * total).reshape(total, 3)
    dataset = dpb.TarShards(shards_of(folder, values, range(total), lengths), tensors)
    positions = data.draw(st.lists(st.integers(0, total - 1), max_size=20))
    assert len(dataset) == total
    found = dataset.__getitems__(positions)
    assert [label for _, label in found] == positions
    assert all(torch.equal(x, values[i]) for (x, _), i in zip(found, positions, strict=True))
    for outside in (-1, total):
        with pytest.raises(IndexError, match=f"from 0 to {total - 1}"):
            dataset[outside]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_same_records_in_memory(data, num_workers):
    x, y, index = data
    dataset = dpb.TarShards(index, tensors)
    loader = PoissonLoader(DataLoader(dataset, num_workers=num_workers), 0.1)
    for number, (features, labels) in enumerate(loader):
        positions = loader.sampler_of_draws._draws[number].records
        assert torch.equal(features, x[positions]) and torch.equal(labels, y[positions])
    assert number == 9


def make_private(index, accountant):
    net = torch.nn.Linear(3, 2)
    return dpb.PrivacyEngine(accountant).make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(dpb.TarShards(index, tensors), batch_size=6),
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("when", ["between passes", "within a pass"])
@pytest.mark.parametrize("change", ["shorter", "other records", "gone"])
def test_a_shard_that_changed_is_found_before_its_batch_is_charged(data, when, change):
    x, y, index = data
    accountant = dpb.PrivacyAccountant(100.0, 1e-5)
    net, optimizer, loader = make_private(index, accountant)

    def train():
        for features, labels in loader:
            torch.nn.functional.cross_entropy(net(features), labels).backward()
            optimizer.step()
            yield

    steps = train()
    for _ in range(10 if when == "between passes" else 3):
        next(steps)
    path, before = index.parent / "3.tar", accountant.get_epsilon(1e-5)
    if change == "gone":
        path.unlink()
    else:
        rows = range(21, 60 if change == "other records" else 50)
        os.utime(path, ns=(0, 0))
        write(path, {f"{i}": {"x": x[i].numpy().tobytes(), "y": b"1"} for i in rows})
    charged = 0
    with pytest.raises((RuntimeError, FileNotFoundError), match=r"3\.tar"):
        steps = train() if when == "between passes" else steps
        for _ in range(4 * len(loader)):  # the first batch with a record of that shard
            next(steps, None)
            charged += 1
    if when == "between passes":
        assert accountant.get_epsilon(1e-5) == before
    else:
        assert charged < 10


BAD = {
    "more than there are": ({"0.tar": 3}, {}, "0.tar holds 2 records, and the index says 3"),
    "fewer than there are": ({"0.tar": 1}, {}, "0.tar holds 2 records, and the index says 1"),
    "other bytes": ({"0.tar": 2}, {"filesize": 7}, "bytes, and the index says 7"),
    "twice": ({"0.tar": 2, "./0.tar": 2}, {}, "twice"),
    "a link to it": ({"0.tar": 2, "link.tar": 2}, {}, "twice"),
    "elsewhere": ({"https://example.org/0.tar": 2}, {}, "copy the shards"),
    "a pipe": ({"pipe:cat 0.tar": 2}, {}, "copy the shards"),
    "half a record": ({"0.tar": 1.5}, {}, "whole number from 0, got 1.5"),
    "fewer than none": ({"0.tar": -2}, {}, "whole number from 0, got -2"),
    "a truth value": ({"0.tar": True}, {}, "whole number from 0, got True"),
    "no shards": ({}, {}, "lists no records"),
    "empty shards": ({"empty.tar": 0}, {}, "lists no records"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_index_that_is_wrong_is_refused(tmp_path, name):
    counts, more, message = BAD[name]
    write(tmp_path / "0.tar", {"a": {"x": b"1"}, "b": {"x": b"2"}})
    write(tmp_path / "empty.tar", {})
    (tmp_path / "link.tar").symlink_to("0.tar")
    with pytest.raises(ValueError, match=message):
        dpb.TarShards(write_index(tmp_path, counts, **more), dict)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", '{"shardlist": 7}', '{"shardlist": [{"url": "0.tar"}]}', "0.tar\n1.tar"]
)
def test_what_is_no_index_is_refused(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ValueError, match="no index of shards"):
        dpb.TarShards(tmp_path / "index.json", dict)


def test_shards_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        dpb.TarShards(tmp_path / "index.json", dict)
    with pytest.raises(FileNotFoundError):
        dpb.TarShards(write_index(tmp_path, {"0.tar": 1}), dict)
    (tmp_path / "0.tar").write_bytes(random.randbytes(5000))
    with pytest.raises(tarfile.ReadError):
        dpb.TarShards(write_index(tmp_path, {"0.tar": 1}), dict)
    write(tmp_path / "0.tar", {"a": {"x": b"1"}})
    with tarfile.open(tmp_path / "0.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo("a.x"))
    with pytest.raises(ValueError, match="two files of one extension"):
        dpb.TarShards(write_index(tmp_path, {"0.tar": 1}), dict)

"""The main example: through scripts/demo as people call it, and its other variants in this
process.
"""

import importlib.util
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def private_bnn():
    return load_example("private_bnn")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("run"))


def rows(out):
    """The numbers of the two rows of the final table."""
    names = ("posterior average", "average of the run", "last iterate")
    found = [line for line in out.splitlines() if line.startswith(names)]
    assert len(found) == 2, out
    return [[float(number) for number in re.findall(r"-?\d+\.\d+", line)] for line in found]


def stated(out, name):
    (line,) = [line for line in out.splitlines() if re.match(rf"{name}  ", line)][-1:]
    return float(line[22:].split()[0])


@pytest.mark.thorough
def test_demo_trains_on_digits_and_draws_the_picture(tmp_path):
    picture = tmp_path / "digits.png"
    arguments = ["--epochs", "2", "--epsilon", "3"]
    command = [ROOT / "scripts" / "demo", *arguments]
    # tested in an environment of one's own: don't make another one for it
    if Path(sys.prefix) != ROOT / ".venv":
        command = [sys.executable, ROOT / "examples" / "private_bnn.py", *arguments]
    run = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr

    for accuracy, likelihood, calibration, outside in rows(run.stdout):
        assert (
            0 <= accuracy <= 100
            and 0 < likelihood < 10
            and 0 <= calibration <= 1
            and 0 <= outside <= 1
        )
    assert 2.9 < stated(run.stdout, "epsilon") <= 3
    assert "z_L" in run.stdout and "seconds" in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000

    lines = [line for line in re.split(r"[\r\n]+", run.stderr) if line]
    said = [line for line in lines if "step/s]" not in line]
    assert len(said) == 1 and "now draws Poisson batches" in said[0], run.stderr
    assert re.search(r"epoch 2/2, epsilon [23]\.\d+ spent, 0\.\d+ left: 100%", lines[-1]), lines[-1]


@pytest.mark.thorough
def test_regression_states_its_likelihood(private_bnn, capsys):
    private_bnn.main(["--task", "regression", "--epochs", "3"])
    out = capsys.readouterr().out
    assert "Gaussian, variance 1/2" in out
    for error, likelihood, covered in rows(out):
        assert 0 < error < 500 and 0 < likelihood < 50 and 0 <= covered <= 100
    assert stated(out, "epsilon") <= 5
    assert Path("diabetes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_infinite_epsilon_is_the_baseline_without_noise_and_says_so(private_bnn, capsys):
    private_bnn.main(["--epsilon", "inf", "--epochs", "30"])
    captured = capsys.readouterr()
    assert (
        stated(captured.out, "epsilon") == float("inf") and stated(captured.out, "temperature") == 0
    )
    assert "not private" in captured.err and "spent" not in captured.err
    average, last = rows(captured.out)
    assert average[0] > 70 and last[0] > 70  # chance is 10; it reaches 93


@pytest.mark.thorough
def test_seed_decides_weights_and_split_but_not_noise(private_bnn, capsys):
    runs = []
    for _ in range(2):
        private_bnn.main(["--epochs", "1", "--seed", "7"])
        runs.append(rows(capsys.readouterr().out))
    assert runs[0] != runs[1]
    first, second = private_bnn.digits(7), private_bnn.digits(7)
    assert torch.equal(first.test_x, second.test_x)
    train, test = private_bnn.split(101, 7)
    assert sorted(torch.cat([train, test]).tolist()) == list(range(101)) and len(test) == 20


@pytest.fixture
def data_root(tmp_path):
    """Both data sets in torchvision's layout, 64 random images each."""
    for data_set in ("MNIST", "FashionMNIST"):
        raw = tmp_path / data_set / "raw"
        raw.mkdir(parents=True)
        for part in ("train", "t10k"):
            images = torch.randint(256, (64, 28, 28)).to(torch.uint8).numpy().tobytes()
            labels = torch.arange(64).remainder(10).to(torch.uint8).numpy().tobytes()
            (raw / f"{part}-images-idx3-ubyte").write_bytes(
                struct.pack(">iiii", 0x803, 64, 28, 28) + images
            )
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 0x801, 64) + labels)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_image_data_sets_are_read_where_they_lie(private_bnn, data_root, capsys, name):
    before = sorted(data_root.rglob("*"))
    options = [
        "--dataset",
        name,
        "--data-root",
        str(data_root),
        "--epochs",
        "1",
        "--batch-size",
        "32",
    ]
    private_bnn.main(options)
    out = capsys.readouterr().out
    assert len(rows(out)) == 2
    assert f"{name}: 64 training and 64 test records, 26010 parameters" in out
    assert sorted(data_root.rglob("*")) == before


@pytest.mark.first_cases(11)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "nan"], "epsilon"),
        (["--epsilon", "much"], "invalid float value"),
        (["--delta", "1"], "delta"),
        (["--delta", "0"], "delta"),
        (["--lr", "0"], "lr must be positive"),
        (["--lr", "1e30", "--epsilon", "inf", "--epochs", "3"], "not finite"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--batch-size", "0"], "batch_size"),
        (["--batch-size", "5000"], "larger than the data set"),
        (["--max-grad-norm", "0"], "max_grad_norm must be positive"),
        (["--temperature", "-1"], "temperature"),
        (["--epsilon", "inf", "--temperature", "1"], "leave out --temperature"),
        (["--task", "regression", "--dataset", "mnist"], "not for --task regression"),
        (["--dataset", "diabetes"], "not for --task classification"),
        (["--plot", "no such folder/x.png"], "there is no folder"),
        (["--dataset", "mnist", "--data-root", "no such folder"], "torchvision"),
        (["--dataset", "imagenet"], "invalid choice"),
        (["--eps", "3"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_refused_with_a_reason(private_bnn, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        private_bnn.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_help_says_what_the_seed_does_not_do(private_bnn, capsys):
    with pytest.raises(SystemExit) as exit:
        private_bnn.main(["--help"])
    assert exit.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "noise and batches always come from the operating system's entropy" in out
    for name, settings in private_bnn.SETTINGS.items():
        assert f"{name} epsilon {settings['epsilon']:g}" in out


@pytest.mark.parametrize("wrong", [["--epsilon", "-1"], ["--epsilon", "nan"], ["--delta", "2"]])
def test_the_command_line_answers_in_its_own_terms(private_bnn, capsys, wrong):
    with pytest.raises(SystemExit):
        private_bnn.main(wrong)
    said = capsys.readouterr().err
    assert f"error: {wrong[0]} " in said and "None" not in said


@pytest.mark.thorough
def test_the_words_of_the_tables_are_explained(private_bnn, capsys):
    private_bnn.main(["--epochs", "1"])
    out = capsys.readouterr().out
    for word in ("NLL", "ECE", "temperature", "floor"):
        assert re.search(rf"^{word}  .*[a-z]", out, re.MULTILINE)
    assert "scripts/demo --task classification --epsilon inf" in out
    private_bnn.main(["--epochs", "1", "--epsilon", "inf"])
    assert "posterior" not in capsys.readouterr().out

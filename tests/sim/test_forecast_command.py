"""`torchtensorref forecast`: a table for cards that are not there."""

import json

import pytest

from torchTensorRef.__main__ import main
from torchTensorRef.base.options import settings

from ..support import processes
from ..support.sweeps import only_in_sweeps

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@pytest.fixture(autouse=True)
def the_device_is_given_back(monkeypatch):
    """The command chooses one where none is set, and other tests look at what is set."""
    monkeypatch.setattr(settings, "device", settings.device)


def forecast(*arguments, **options):
    return processes.python("-m", "torchTensorRef", "forecast", *arguments, **options)


def status_of(*arguments):
    """Run a command in this process; return its status."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


@only_in_sweeps
def test_a_model_over_several_cards(tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    status = status_of(
        "forecast", "--model", tmp_path, "--device", "rtx4060,h200", "--prompt", "9",
        "--new-tokens", "20", "--budget", "200KB", "--plot", tmp_path / "curve.png",
    )  # fmt: skip
    assert status == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:3]] == ["rtx4060", "h200"]
    assert rows[3].startswith("20 tokens in: rtx4060 ")
    assert max(map(len, rows[:4])) <= 80
    assert (tmp_path / "curve.png").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_prompt_leaves_for_the_next_token_is_a_cache(tmp_path, capsys, count):
    """Of one token, nobody read it: it counted as activations."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = ("--model", tmp_path, "--prompt", "512", "--new-tokens", count)
    assert status_of("forecast", *given) == 0
    # Keys and values: 3 layers, 2 heads of 16 numbers, 512 tokens, two bytes each.
    assert "cache 192.00 KiB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "falcon_mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2},
        {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 2},
    ],
    ids=lambda config: config["model_type"],
)
def test_what_a_model_keeps_between_tokens_has_several_names(tmp_path, capsys, config):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    assert status_of("forecast", "--model", tmp_path, "--prompt", "9", "--new-tokens", "4") == 0
    assert "token 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--model .", "transformers makes no causal language model of .: "),
        ("--model other.json", "transformers makes no causal language model of other.json: "),
        ("--model . --dtype bfloat61", "Did you mean 'bfloat16'?"),
        (
            "--model . --plot no/such.png",
            "--plot='no/such.png' is not understood",
        ),
        (".", ". is a folder without a __main__.py"),
        ("nothing.py", "runs no operator: nothing is to be foretold"),
        ("--strategy flwo nothing.py", "Did you mean 'flow'?"),
    ],
)
def test_what_cannot_be_foretold_is_said_in_a_line(tmp_path, monkeypatch, capsys, given, words):
    pytest.importorskip("transformers")
    (tmp_path / "other.json").write_text("not json")
    (tmp_path / "nothing.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert status_of("forecast", *given.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_a_script(script, capsys):
    path = script(
        """
        import sys, torch
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 10))
        loss = model(torch.randn(5, 100)).square().mean()
        loss.backward()
        print(sys.argv[1:], loss.item())
        """
    )
    assert status_of("forecast", "--device", "rtx3060", path, "--flag", "x") == 0
    out = capsys.readouterr().out
    assert "['--flag', 'x'] 0." in out
    assert "rtx3060" in out
    assert "for management" not in out


def test_a_scripts_own_error_is_told_as_python_tells_it(script):
    """What it could not open was said to be something that we could not write."""
    path = script("import torch\ntorch.ones(2)\nopen('nowhere/data.csv')\n")
    done = forecast("--device", "rtx3060", path)
    assert done.returncode == 1
    first, place, *_, last = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert place == f'  File "{path}", line 3, in <module>'
    assert last == "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere/data.csv'"
    assert "could not be written" not in done.stderr


def test_a_script_on_a_host_whose_time_is_counted(script, capsys):
    path = script(
        """
        import torch
        layers = [torch.nn.Linear(64, 64) for _ in range(40)]
        for _ in range(3):
            x = torch.ones(1, 64)
            for layer in layers:
                x = layer(x)
        """
    )
    given = ("--device", "rtx3060", "--host", "epyc", "--budget", "200KB", path)
    assert status_of("forecast", *given) == 0
    out = capsys.readouterr().out
    assert "AMD EPYC" in out
    assert "the host's own time bounds this run" in out
    assert "a larger budget" in " ".join(out.split())


def test_a_script_that_begins_with_a_tensor(script):
    path = script("import torch\nx = torch.ones(3)\nprint((x + x).tolist())\n")
    done = forecast("--device", "rtx3060", path)
    assert done.returncode == 0, done.stderr
    assert "[2.0, 2.0, 2.0]" in done.stdout
    assert "rtx3060" in done.stdout
    # It runs at home, where calls take no virtual time: "1000000000.00 /s", "0.00x" said nothing.
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("rtx3060"))
    assert row.split()[-3:] == ["-", "-", "calls"]
    assert "which the host's calls takes: it runs at home" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "either --model, or a script"),
        (("nothing.py",), "There is no program"),
        (("--model", "nowhere"), "There is no nowhere"),
        (("--device", "rtx9060", "x.py"), "rtx"),
        (("--host", "epic", "x.py"), "epyc"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, arguments, said):
    assert status_of("forecast", *arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err

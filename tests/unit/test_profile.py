"""``python -m faser_sglang.profile``: its arguments, and what it says of a table."""

import numpy as np
import pytest

from faser_sglang import config
from faser_sglang.config import FaserConfig
from faser_sglang.control.cost import CostTable
from faser_sglang.profile import __main__ as profile
from faser_sglang.profile.report import best_depth, plot, summary

CAP = 8


def table(pace=1.0, row=0.0, **more):
    """A target pass of 10 ms and ``row`` for each further row of a request; free of host time."""
    sizes, windows = [1, 4], list(range(1, CAP + 2))
    values = {
        "requests": sizes, "windows": windows,
        "verify": [[10.0 + row * n * (w - 1) for w in windows] for n in sizes],
        "first": [pace] * 2, "step": [pace] * 2, "catch_up": 0.5, "host": [0.0] * 2,
        "context": 48.0, "context_slope": 0.002,
    }  # fmt: skip
    return CostTable(**(values | more))


def test_own_arguments_end_at_the_two_dashes(tmp_path):
    out = tmp_path / "t.json"
    args, further = profile.parse(
        ["--model", "m", "--output", str(out), "--", "--page-size", "16", "--", "--model"]
    )
    assert (args.model, args.output, args.draft, args.drafter) == ("m", out, None, "auto")
    assert further == ["--page-size", "16", "--", "--model"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "--model"),
        (["--model", "m", "--repeats", "0"], "--repeats is 0; it takes 1 or more."),
        (["--model", "m", "--max-batch", "-1"], "--max-batch is -1; it takes 1 or more."),
        (["--model", "m", "--drafter", "oracle"], "invalid choice: 'oracle'"),
        (["--model", "m", "--output", "no/folder/t.json"], "there is no folder no/folder"),
        (["--model", "m", "--output", "."], "--output . cannot be written: it is a folder."),
        (["--model", "m", "--plot", "no/folder/t.svg"], "--plot no/folder/t.svg cannot be written"),
        (["--model", "m", "--plot", "t.txt"], "ends in .svg, .png or .pdf"),
        (["--model", "m", "--faser-depth", "3"], "--faser-depth"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told_before_anything_starts(given, sentence, capsys):
    with pytest.raises(SystemExit) as error:
        profile.parse(given)
    assert error.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(profile.importlib.util, "find_spec", lambda _name: None)
    profile.parse(["--model", "m"])
    with pytest.raises(SystemExit):
        profile.parse(["--model", "m", "--plot", "t.svg"])
    assert "pip install matplotlib" in capsys.readouterr().err


def line(*given):
    args, further = profile.parse(["--model", "m", *given])
    words = profile.server_arguments(args, further)
    return " ".join(words)


def test_the_server_that_measures_is_the_users():
    words = line("--draft", "d", "--drafter", "hybrid", "--", "--dtype", "float32")
    assert "--model-path m --speculative-algorithm FASER" in words
    assert "--speculative-draft-model-path d --faser-drafter hybrid" in words
    assert words.endswith("--dtype float32")
    assert "draft-model" not in line("--drafter", "ngram")


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ([], "48"),
        (["--max-batch", "4"], "48"),  # the server keeps its size, the measurement is bounded
        (["--max-batch", "200"], "200"),
        (["--max-batch", "200", "--", "--max-running-requests=64"], None),
        (["--", "--max-running-requests", "64"], None),
    ],
)
def test_the_server_runs_as_many_requests_as_are_to_be_measured(given, most):
    words = line(*given)
    assert words.count("--max-running-requests") == 1
    assert most is None or f"--max-running-requests {most}" in words


@pytest.mark.parametrize(
    "values", [{"mode": "off"}, {"depth": 3}, {"depth": "random"}, {"cost_table": "t"}], ids=str
)
def test_flags_with_which_nothing_is_measured_are_refused(values):
    profile.check_settings(FaserConfig(drafter="hybrid", trim="off"))
    with pytest.raises(ValueError, match="nothing is measured") as error:
        profile.check_settings(FaserConfig(**values))
    assert "leave them out" in str(error.value)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command where an Engine would write ``table``, or raise ``error``."""
    monkeypatch.setenv(config.CARRIER, "")

    def run(*given, table=None, error=None):
        def measure(_args, _further, partial):
            if error is not None:
                raise error
            if table is not None:
                table.save(partial)

        monkeypatch.setattr(profile, "measure", measure)
        given = ["--model", "m", "--output", str(tmp_path / "cost.json"), *given]
        return profile.main(given), capsys.readouterr()

    return run


def test_what_was_measured_is_written_and_told(run, tmp_path):
    status, said = run("--plot", str(tmp_path / "cost.svg"), table=table())
    assert status == 0 and said.err == ""
    assert CostTable.load(tmp_path / "cost.json") == table()
    assert "--faser-cost-table" in said.out and "10.00 ms" in said.out
    assert (tmp_path / "cost.svg").read_text().lstrip().startswith("<?xml")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cost.json", "cost.svg"]


@pytest.mark.parametrize("why", [{"error": ValueError("no such model.")}, {}], ids=str)
def test_a_measurement_that_failed_leaves_the_old_table(why, run, tmp_path):
    table(pace=7.0).save(tmp_path / "cost.json")
    status, said = run(**why)
    assert status == 1 and said.out == "" and said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    assert CostTable.load(tmp_path / "cost.json") == table(pace=7.0)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_depth_that_is_suggested_brings_most_tokens_a_millisecond():
    """By hand: 1 + a + … tokens, 10 ms and 1 ms a step, verification of more rows free."""
    for acceptance in (0.0, 0.5, 0.9):
        tokens = np.cumsum([acceptance**k for k in range(CAP + 1)])
        rates = tokens / [10.0 + depth for depth in range(CAP + 1)]
        best, gain = best_depth(table(), 1, acceptance)
        assert best == rates.argmax() and gain == pytest.approx(rates.max() / 0.1)


def test_drafting_that_costs_more_than_it_brings_is_not_suggested():
    assert best_depth(table(pace=20.0), 1, 0.5) == (0, 1.0)
    assert best_depth(table(row=10.0), 4, 0.9)[0] == 0


def test_the_summary_has_a_line_for_each_size():
    lines = summary(table(row=1.0)).splitlines()
    assert lines[1].split()[0] == "1" and lines[2].split()[0] == "4"
    assert lines[1].split()[1:6] == ["10.00", "ms", "0.10", "0.10", "0.00"]
    assert lines[1].split()[6] == "1.80" and lines[2].split()[6] == "4.20"
    assert len(lines[0]) == len(lines[1]) == len(lines[2])
    assert "0.500 ms" in lines[-1] and "2.000 ms" in lines[-1]


@pytest.mark.parametrize("name", ["t.svg", "t.png", "t.pdf"])
def test_a_table_of_one_size_and_no_origin_can_be_drawn(name, tmp_path):
    one = {"requests": [1], "verify": [[1.0] * (CAP + 1)], "first": [0.0], "step": [0.0]}
    plot(table(**one, host=[0.0]), tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000

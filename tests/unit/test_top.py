"""`top`: what it shows of a recorded server, and what it says where there is nothing to show."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from faser_sglang import top
from faser_sglang.top_samples import FLUSHED, RESTARTED, Sample, Sums, Watch, merge
from faser_sglang.top_view import render

INFO = json.loads((Path(__file__).parents[1] / "data" / "server_info.json").read_text())
FASER = INFO["internal_states"][0]["faser"]


def later(**added):
    """The recorded block after further rounds, each of two drafts of which one was accepted."""
    faser = copy.deepcopy(FASER)
    rounds = added.get("rounds", 0)
    counters = faser["counters"]
    counters["depth_histogram"]["2"] = rounds
    counters["tested_by_position"] = [8 + rounds, rounds]
    counters["accepted_by_position"] = [6 + rounds, 0]
    for name, each in (("rounds", 1), ("drafted", 3), ("trimmed", 1), ("verified", 2)):
        counters[name] += each * rounds
    for name, each in (("accepted", 1), ("emitted", 2), ("passes", 1)):
        counters[name] += each * rounds
    return faser


def watched(*samples):
    watch = Watch("http://server")
    for at, server, faser in samples:
        watch.take(Sample(at, server, faser, running=3, waiting=1))
    return watch


def shown(watch):
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(watch))
    return console.export_text()


def row(text, name):
    (line,) = [line for line in text.splitlines() if name in line]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_the_first_frame_shows_what_the_server_has_counted():
    text = shown(watched((0.0, "a", FASER)))
    assert "mode serial, drafter lm, depth auto, cap 8, stop on, trim on" in text
    assert "requests: 3 running, 1 waiting" in text and "draft faults: 0" in text
    assert row(text, "accept length") == ["-", "1.01"]
    assert row(text, "accepted of verified") == ["-", "6 of 8 (75%)"]
    assert row(text, "rounds saved") == ["-", "6 of 715 (1%)"]
    assert "0.75 of 8" in text and "0.99 701" in text
    assert "off by 10% (179 rounds timed)" in text
    assert "must bring 0.016 tokens" in " ".join(text.split())


def test_the_next_frame_shows_rates_of_the_time_between():
    text = shown(watched((0.0, "a", FASER), (2.0, "a", later(rounds=20))))
    assert row(text, "tokens/s") == ["20.0", ""]
    assert row(text, "accept length") == ["2.00", "1.04"]
    assert row(text, "mean depth")[0] == "2.00"
    assert row(text, "accepted of verified")[0] == "20 of 40 (50%)"
    assert row(text, "trimmed of drafts")[0] == "20 of 60 (33%)"
    assert "acceptance by position, last 2.0 s" in text
    assert "1.00 of 20" in text and "0.00 of 20" in text and "1.00 20" in text


def test_an_idle_server_shows_its_totals_again():
    text = shown(watched((0.0, "a", FASER), (1.0, "a", FASER)))
    assert row(text, "tokens/s") == ["0.0", ""]
    assert "rounds by depth, since start or flush" in text


def test_counters_that_begin_anew_are_a_restart_or_a_flush_and_give_no_rates():
    for server, note in (("b", RESTARTED), ("a", FLUSHED)):
        watch = watched((0.0, "a", later(rounds=20)), (1.0, server, FASER))
        assert watch.note == note and watch.recent is None
        assert note in shown(watch)
        watch.take(Sample(2.0, server, later(rounds=1)))
        assert watch.note == "" and watch.recent["rounds"] == 1


def test_a_restart_is_noticed_although_the_new_server_has_counted_more():
    assert watched((0.0, "a", FASER), (1.0, "b", later(rounds=9))).note == RESTARTED


def test_a_server_that_stops_answering_leaves_the_last_frame():
    watch = watched((0.0, "a", FASER))
    watch.miss("It cannot be reached.")
    assert "It cannot be reached." in shown(watch) and "1.01" in shown(watch)


def test_a_server_that_has_done_nothing_and_has_no_controller_is_drawn():
    faser = copy.deepcopy(FASER)
    empty = {"depth_histogram": {}, "tested_by_position": [], "accepted_by_position": []}
    faser["counters"] = {name: 0 for name in faser["counters"]} | empty
    faser |= {"controller": None, "host_ms_per_round": {}}
    text = shown(watched((0.0, "a", faser)))
    assert "none yet" in text and "No controller" in text


def test_data_parallel_ranks_are_added_up():
    other = later(rounds=5)
    other["draft_faults"] = 2
    both = merge([FASER, other])
    assert both["counters"]["rounds"] == 2 * FASER["counters"]["rounds"] + 5
    assert both["counters"]["tested_by_position"] == [8 + 13, 5]
    assert both["counters"]["depth_histogram"] == {"0": 1402, "1": 16, "2": 5}
    assert both["draft_faults"] == 2 and FASER["draft_faults"] == 0
    assert Sums.of(both)["emitted"] == sum(f["counters"]["emitted"] for f in (FASER, other))


@pytest.fixture
def serve():
    """A server that answers each route with (status, text)."""
    servers = []

    def start(routes):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                status, text = routes.get(self.path, (404, "no such route"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_once_prints_a_frame_without_a_terminal(serve, capsys):
    loads = {"loads": [{"num_running_reqs": 4, "num_waiting_reqs": 0}]}
    url = serve(
        {
            "/server_info": (200, json.dumps(INFO)),
            "/v1/loads?include=core": (200, json.dumps(loads)),
        }
    )
    assert top.main(["--url", url, "--once", "--interval", "0.01"]) == 0
    out = capsys.readouterr().out
    assert f"FASER at http://{url}" in out and "4 running" in out and "accept length" in out


def test_once_does_without_a_route_for_the_load(serve, capsys):
    url = serve({"/server_info": (200, json.dumps(INFO))})
    assert top.main(["--url", url, "--once", "--interval", "0.01"]) == 0
    assert "running" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, json.dumps({**INFO, "internal_states": [{}]})), "runs FASER; start one with"),
        (
            (200, json.dumps({"speculative_algorithm": None, "internal_states": [{}]})),
            "runs no speculative algorithm; start one with --speculative-algorithm FASER",
        ),
        ((200, "<html>"), "is no SGLang server."),
        ((200, "[]"), "is no SGLang server."),
        ((404, "not found"), "is no SGLang server."),
        ((401, "{}"), "wants its key; give it with --api-key."),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_sentence(serve, capsys, answer, said):
    assert top.main(["--url", serve({"/server_info": answer}), "--once"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and said in error and error.count("\n") == 1


def test_a_server_that_is_not_there_is_said_in_one_sentence(capsys):
    assert top.main(["--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "cannot be reached; start one, or name another with --url." in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon"])
def test_an_interval_that_is_none_is_refused(interval, capsys):
    with pytest.raises(SystemExit):
        top.main([f"--interval={interval}", "--once"])
    assert "seconds above 0" in capsys.readouterr().err


def test_top_needs_neither_torch_nor_sglang():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None; "
        "import faser_sglang.top, faser_sglang.top_view; faser_sglang.top.Client('x')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

"""`python -m faser_sglang.top`: what a FASER server is doing, live in the terminal.

Reads ``/server_info`` every interval and shows differences. Imports neither torch nor SGLang, so it
starts at once, and runs where neither is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from faser_sglang.top_samples import Sample, Watch, merge

if TYPE_CHECKING:
    from rich.console import Console

TIMEOUT = 10.0  # seconds for an answer
ROUTE = "/server_info"


class TopError(RuntimeError):
    """The server cannot be watched; the message says why in one sentence."""


class Client:
    """Asks the server at ``url``."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        import requests

        self._errors = requests.RequestException
        self._session = requests.Session()
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def sample(self) -> Sample:
        """The server as it is now; raises TopError where it is none, or none of FASER's."""
        info = self._get(ROUTE)
        states = info.get("internal_states") if isinstance(info, dict) else None
        if not isinstance(states, list) or not states:
            raise TopError(f"What answers at {self.url} is no SGLang server.")
        blocks = [state["faser"] for state in states if "faser" in state]
        if not blocks:
            algorithm = info.get("speculative_algorithm") or "no speculative algorithm"
            raise TopError(
                f"The server at {self.url} runs {algorithm}; start one with "
                "--speculative-algorithm FASER to watch it here."
            )
        running, waiting = self._load()
        return Sample(
            at=time.monotonic(),
            server=json.dumps(info.get("startup_time"), sort_keys=True),
            faser=merge(blocks),
            running=running,
            waiting=waiting,
        )

    def _load(self) -> tuple[int | None, int | None]:
        """Requests that run and wait; None where the server does not say."""
        try:
            loads = self._get("/v1/loads?include=core")["loads"]
            return tuple(
                sum(load[name] for load in loads)
                for name in ("num_running_reqs", "num_waiting_reqs")
            )
        except (TopError, KeyError, TypeError):
            return None, None

    def _get(self, route: str) -> Any:
        try:
            answer = self._session.get(self.url + route, timeout=TIMEOUT)
        except self._errors as error:
            kind = "does not answer in time" if "timed out" in str(error) else "cannot be reached"
            raise TopError(
                f"The server at {self.url} {kind}; start one, or name another with --url."
            ) from error
        if answer.status_code in (401, 403):
            raise TopError(f"The server at {self.url} wants its key; give it with --api-key.")
        try:
            answer.raise_for_status()
            return answer.json()
        except (self._errors, ValueError) as error:
            raise TopError(f"What answers at {self.url} is no SGLang server.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where there is nothing to watch."""
    args = _parse(argv)
    try:
        from rich.console import Console
    except ImportError:
        print("top needs rich: pip install rich", file=sys.stderr)
        return 1
    console = Console()
    try:
        client = Client(args.url, args.api_key)
        watch = Watch(client.url)
        watch.take(client.sample())
        if args.once:
            time.sleep(args.interval)
            watch.take(client.sample())
            _print(console, watch)
        else:
            _follow(console, client, watch, args.interval)
    except TopError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _follow(console: Console, client: Client, watch: Watch, interval: float) -> None:
    """Until interrupted: a screen of its own, or frame behind frame where there is no terminal."""
    from rich.live import Live

    from faser_sglang.top_view import render

    if not console.is_terminal:
        while True:
            _print(console, watch)
            time.sleep(interval)
            _next(client, watch)
    with Live(render(watch), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            _next(client, watch)
            live.update(render(watch), refresh=True)


def _next(client: Client, watch: Watch) -> None:
    try:
        watch.take(client.sample())
    except TopError as error:
        watch.miss(str(error))


def _print(console: Console, watch: Watch) -> None:
    from faser_sglang.top_view import render

    console.print(render(watch))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faser_sglang.top", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="Default: %(default)s.")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, help="Seconds a frame. Default: %(default)s."
    )
    parser.add_argument("--once", action="store_true", help="One frame, after one interval.")
    parser.add_argument("--api-key", help="What the server was given as --api-key.")
    return parser.parse_args(argv)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}; it takes seconds above 0, up to 3600")
    return value


if __name__ == "__main__":
    sys.exit(main())

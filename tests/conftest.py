"""Servers shared by the tests that need one: few starts, many tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Several servers and the tests share the cores: one thread each, so that none waits for another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench import parity  # noqa: E402
from bench.parity import CONTEXT  # noqa: E402
from launch import demo_models  # noqa: E402
from launch.servers import Server, start_all  # noqa: E402

COMMON = ["--dtype", "float32", "--random-seed", "7", "--max-total-tokens", "20000"]


@pytest.fixture(scope="session")
def tiny_models() -> tuple[str, str]:
    """A tiny random target with the demo's vocabulary, and a draft that agrees with it often."""
    return str(demo_models.build("tiny")), str(demo_models.build("tiny-drafter"))


@pytest.fixture(scope="session")
def demo_pair() -> tuple[str, str]:
    """SmolLM2-135M-Instruct and its EAGLE3 head."""
    return str(demo_models.build("target")), str(demo_models.build("eagle3"))


@pytest.fixture(scope="session")
def tiny_servers(tiny_models: tuple[str, str]) -> Iterator[tuple[Server, Server]]:
    """The tiny target without speculation and with FASER at random depths, float32."""
    target, draft = tiny_models
    args = [*COMMON, "--chunked-prefill-size", "64", "--context-length", str(CONTEXT)]
    servers = [
        Server(target, args=args, name="tiny-base"),
        Server(
            target,
            draft=draft,
            args=[
                *args,
                "--faser-depth",
                "random",
                "--decode-log-interval",
                "1",
                "--enable-return-hidden-states",
            ],
            # SGLang's own check of the KV account, while busy and when idle.
            env={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
            name="tiny-faser",
        ),
    ]
    start_all(servers)
    try:
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def head_servers() -> Iterator[dict[str, Server]]:
    """A tiny target without speculation ("none"), and with heads at random depths.

    "hybrid" is an EAGLE3 head behind lookup, "eagle" a head of the first EAGLE. Both have requests
    taken out of the batch every few passes.
    """
    target = demo_models.build("tiny-flat")
    args = [*COMMON, "--chunked-prefill-size", "64", "--context-length", str(CONTEXT)]
    drafters = {
        "hybrid": ("tiny-flat-eagle3", ["--faser-drafter", "hybrid"]),
        "eagle": ("tiny-flat-eagle", []),
    }
    servers = {"none": Server(target, args=args, name="flat-none")} | {
        name: Server(
            target,
            draft=demo_models.build(draft),
            args=[*args, "--faser-depth", "random", *flags],
            env={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **dict(parity.RETRACT)},
            name=f"flat-{name}",
        )
        for name, (draft, flags) in drafters.items()
    }
    start_all(list(servers.values()))
    try:
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture(scope="session")
def demo_server(demo_pair: tuple[str, str]) -> Iterator[Server]:
    """The demo target with the hybrid drafter: what SGLang's own kits are run against."""
    target, draft = demo_pair
    env = {"OMP_NUM_THREADS": "2"}  # the tiny servers are idle while this one works
    args = ["--faser-drafter", "hybrid"]
    with Server(target, draft=draft, args=args, env=env, name="demo-faser") as server:
        yield server
